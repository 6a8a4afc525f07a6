"""`resume` continues a run with the same data, settings and bits; what a run decides at its start is stored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import small
from PIL import Image

from fedmll import Callback, Experiment, methods, resume, run
from fedmll.comparison.compare import ComparisonRunner
from fedmll.comparison.comparison_folder import ComparisonFolder
from fedmll.comparison.plan import parse_variant
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.message import Message, Tensors
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.methods.framework.base import Aggregator, Part, Records, TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative
from fedmll.methods.parts.averaging import WeightedMean
from fedmll.training import checkpoint, round_loop

TWELVE = {
    "method__name": "fedmlp", "method__t1": 1, "method__T0": 0.2, "method__T1": 0.2, "partition__clients": 12,
    "partition__kind": "iid", "annotation__kind": "missing", "annotation__missing": 5, "training__rounds": 3,
    "data__limit": 240,
}  # fmt: skip


class StopIn(Callback):
    """Stops like Ctrl-C, in the middle of a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if (round, done) == (self.round, 1):
            raise KeyboardInterrupt


class Hear(Callback):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Checkpoints and client states


def test_resumed_run_with_client_states_gives_the_same_bits(tmp_path: Path) -> None:
    expected = run(small(**TWELVE), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(small(**TWELVE), tmp_path / "run", callback=StopIn(3))
    found, warnings = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint", small_fingerprint(tmp_path / "run"))
    assert not warnings
    assert found is not None
    assert found.client_states == dict.fromkeys(range(12), 2)  # in round 2 every client made its first tags
    hear = Hear()
    assert same(resume(tmp_path / "run", callback=hear).weights, expected.weights)
    assert not hear.warnings
    kept = {path.name for path in (tmp_path / "run" / "checkpoint" / "client_state").iterdir()}
    assert kept == {f"{client:06d}.{round:06d}.safetensors" for client in range(12) for round in (2, 3)}


def small_fingerprint(out: Path) -> str:
    return Experiment.load(out / "experiment.toml").fingerprint()


def test_run_repeated_from_a_round_gives_the_same_bits(tmp_path: Path) -> None:
    expected = run(small(**TWELVE), tmp_path / "run")
    with pytest.raises(ConfigError, match="Possible here: --from-round 1 or --from-round 3 or --from-round 4"):
        round_loop.return_to_round(tmp_path / "run", 2)  # only the last two checkpoints are kept
    round_loop.return_to_round(tmp_path / "run", 3)
    assert [path.name for path in (tmp_path / "run" / "checkpoint").glob("*.safetensors")] == ["000002.safetensors"]
    assert same(resume(tmp_path / "run").weights, expected.weights)
    round_loop.return_to_round(tmp_path / "run", 1)
    assert same(resume(tmp_path / "run").weights, expected.weights)


def test_nothing_unreadable_is_deleted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(**TWELVE), out, callback=StopIn(3))
    newest = out / "checkpoint" / "000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    before = {path.name for path in (out / "checkpoint" / "client_state").iterdir()}
    hear = Hear()
    result = resume(out, callback=hear)
    assert "000002.safetensors is damaged" in hear.warnings[0]
    assert (out / "checkpoint" / "000002.safetensors.damaged-1").exists()
    assert before <= {path.name for path in (out / "checkpoint" / "client_state").iterdir()}
    assert same(result.weights, run(small(**TWELVE)).weights)


@pytest.mark.parametrize("damage", ["flipped bit", "missing"])
def test_damaged_client_state_is_named_and_the_older_checkpoint_used(tmp_path: Path, damage: str) -> None:
    out, longer = tmp_path / "run", TWELVE | {"training__rounds": 4}
    with pytest.raises(KeyboardInterrupt):
        run(small(**longer), out, callback=StopIn(4))
    state = out / "checkpoint" / "client_state" / "000007.000003.safetensors"
    content = bytearray(state.read_bytes())
    content[-5] ^= 16
    state.unlink() if damage == "missing" else state.write_bytes(content)
    hear = Hear()
    result = resume(out, callback=hear)
    assert len(hear.warnings) == 1
    assert "Checkpoint 000003.safetensors cannot be used" in hear.warnings[0]
    assert f"{state} is {'missing' if damage == 'missing' else 'damaged'}" in hear.warnings[0]
    assert "The run continues after round 2" in hear.warnings[0]
    assert (out / "checkpoint" / "000003.safetensors.damaged-1").exists()
    assert state.with_name(f"{state.name}.damaged-1").exists() == (damage != "missing")
    assert same(result.weights, run(small(**longer)).weights)


def test_client_state_damaged_while_a_run_goes_on_stops_it_with_the_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    state = out / "checkpoint" / "client_state" / "000004.000002.safetensors"

    class Damage(Callback):
        def on_round_end(self, row: dict[str, Any]) -> None:
            if row["round"] == 2:
                state.write_bytes(state.read_bytes()[:-1])

    with pytest.raises(DataError, match=r"000004\.000002\.safetensors is damaged"):
        run(small(**TWELVE), out, callback=Damage())
    assert same(resume(out, callback=Hear()).weights, run(small(**TWELVE)).weights)


def test_hundred_rounds_without_divergence_are_accepted(tmp_path: Path) -> None:
    experiment = small(training__rounds=101, engine__evaluate_every=200, data__limit=60, partition__clients=2)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callback=StopIn(101))
    result = resume(tmp_path / "run")
    assert [row["round"] for row in result.rows] == list(range(1, 102))
    assert same(result.weights, run(experiment).weights)


# Replies that carry other things than weights


class Variate(Part):
    """Sends a vector that starts at zero and grows large, as control variates do, and declares it so."""

    name: ClassVar[str] = "test-variate"

    def initial_state(self) -> Tensors:
        return {"variate": torch.zeros(3)}

    def send(self, state: Tensors, peer: ClientInfo, round: int) -> Tensors:
        return state

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"variate": TensorSpec((3,), low=-1e9, high=1e9)}

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        assert self.received(client_round)["variate"].tolist() == [1e6 * (client_round.number - 1)] * 3
        return {"variate": torch.full((3,), 1e6 * client_round.number)}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return MeanVariate()


class MeanVariate(Aggregator):
    def __init__(self) -> None:
        self.mean = WeightedMean()

    def add(self, peer: ClientInfo, reply: Message) -> None:
        self.mean.add({"variate": reply["variate"]}, reply.numbers["samples"])

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return self.mean.result(), {}


class Variates(Method):
    name: ClassVar[str] = "test-variates"
    parts = (UnknownAsNegative, Variate)


@pytest.mark.parametrize("workers", [0, 1])
def test_limit_for_weights_does_not_apply_to_other_tensors(workers: int) -> None:
    result = run(small(method__name="test-variates", engine__workers=workers))
    assert result.rows[-1]["clients"] == 4


@pytest.mark.parametrize("rubbish", [0.0, 1e30, float("nan")])
def test_rejection_does_not_depend_on_uninitialised_memory(rubbish: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(small(**TWELVE))
    empty = torch.empty

    def dirty(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(rubbish) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", dirty)
    assert same(run(small(**TWELVE)).weights, expected.weights)


# The data


def folder_of_images(folder: Path, rows: int = 60, size: int = 12) -> Path:
    """FOLDER/images and FOLDER/labels.csv: three classes, a fifth marked as test."""
    (folder / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    lines = ["image,split,cat,dog,cow"]
    for place in range(rows):
        pixels = draw.integers(0, 255, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{place}.png")
        split = "test" if place % 5 == 0 else "train"
        lines.append(f"{place}.png,{split},{place % 2},{int(place % 3 == 0)},{int(place % 4 == 1)}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder / "labels.csv"


def own_images(folder: Path, **changes: Any) -> Experiment:
    return small(
        **{"data__name": f"folder:{folder / 'labels.csv'}", "data__root": str(folder / "images"),
           "data__limit": None, "partition__clients": 2, "partition__kind": "iid"} | changes
    )  # fmt: skip


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    csv = folder_of_images(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(own_images(tmp_path), tmp_path / "run", callback=StopIn(2))
    text = csv.read_text()
    csv.write_text(text.replace("\n1.png,train,1,0,1", "\n1.png,train,0,1,1"))
    with pytest.raises(DataError, match=r"labels of the training data changed \(cat: 24 → 23 present, dog: 16 → 17"):
        resume(tmp_path / "run")
    csv.write_text("\n".join(text.splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match="the training data has 47 samples, not 48"):
        resume(tmp_path / "run")
    csv.write_text(text.replace("cow", "sheep"))
    with pytest.raises(DataError, match="cow was removed, sheep is new"):
        resume(tmp_path / "run")
    csv.write_text(text)
    picture = tmp_path / "images" / "7.png"
    original = picture.read_bytes()
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(picture)
    with pytest.raises(DataError, match="images of the training data or their order changed"):
        resume(tmp_path / "run")
    picture.write_bytes(original)
    written = (tmp_path / "run" / "data_fingerprint.json").read_text()
    for damaged in ("", "{", "[1]", '{"test": {}}', '{"test": 3}'):
        (tmp_path / "run" / "data_fingerprint.json").write_text(damaged)
        with pytest.raises(DataError, match=r"data_fingerprint\.json is damaged .* Restore it from a copy"):
            resume(tmp_path / "run")
    (tmp_path / "run" / "data_fingerprint.json").write_text(written)
    assert len(resume(tmp_path / "run").rows) == 2


def test_resume_from_another_folder_and_with_moved_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of_images(tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    experiment = small(
        data__name="folder:labels.csv", data__root="images", data__limit=None, partition__clients=2,
        partition__kind="iid",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(experiment, "run", callback=StopIn(2))
    monkeypatch.chdir(tmp_path / "elsewhere")
    expected = run(own_images(tmp_path / "here"))
    assert same(resume(tmp_path / "here" / "run").weights, expected.weights)
    (tmp_path / "here" / "images").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="--root"):
        resume(tmp_path / "here" / "run")
    again = resume(tmp_path / "here" / "run", data={"root": tmp_path / "moved"})
    assert same(again.weights, expected.weights)
    assert same(resume(tmp_path / "here" / "run").weights, expected.weights)  # it is remembered where they are now


@pytest.mark.parametrize("holdout", ["auto", 0.25])
def test_source_with_validation_data_has_no_held_out_samples(tmp_path: Path, holdout: Any) -> None:
    csv = folder_of_images(tmp_path)
    text = csv.read_text()
    for place in range(1, 60, 10):
        text = text.replace(f"\n{place}.png,train", f"\n{place}.png,validation")
    csv.write_text(text)
    data = federation.build(own_images(tmp_path, partition__holdout=holdout))
    assert len(data.validation) == 6
    result = run(own_images(tmp_path, partition__holdout=holdout))
    if holdout == "auto":
        assert data.experiment.partition.holdout == 0
        assert data.sizes.sum() == 42  # of 60: 12 test, 6 validation
        assert "client_mean_auc" not in result.metrics
    else:
        assert data.sizes.sum() + len(data.held_out) == 42
        assert len(result.per_client["client"]) == 2  # what they hold out is what they are measured on
        assert result.per_client["samples"].sum() == len(data.held_out)
    assert "val_macro_auc" in result.metrics


# What was left open


def test_every_auto_setting_is_resolved_once_and_stored(tmp_path: Path) -> None:
    hear = Hear()
    run(small(method__name="fedmlp", training__rounds=20, engine__evaluate_every=20), tmp_path / "run", callback=hear)
    text = (tmp_path / "run" / "experiment.toml").read_text()
    undecided = [line for line in text.partition("[engine]")[0].splitlines() if "auto" in line]
    assert undecided == ['server_lr = "auto"', 'server_beta1 = "auto"']  # of a part that the method does not use
    assert "first_stage = 2" in text
    assert hear.notes == ["method.first_stage = 2 (10 % of the rounds, as published)"]
    assert hear.notes[0] in (tmp_path / "run" / "log.txt").read_text()
    assert small(method__name="fedharmony", training__rounds=30).method.options["horizon"] == 15


def test_open_settings_are_resolved_again_after_a_change() -> None:
    base = small(method__name="fedmlp", training__rounds=20)
    assert base.changed({"training.rounds": 200}).method.options["first_stage"] == 20
    given = small(method__name="fedmlp", training__rounds=20, method__t1=7)
    assert given.changed({"training.rounds": 200}).method.options["first_stage"] == 7


@pytest.mark.parametrize(("rounds", "t1"), [(1, "auto"), (6, 6), (6, 7)])
def test_fedmlp_without_a_second_stage_is_refused(rounds: int, t1: Any) -> None:
    with pytest.raises(ConfigError, match=r"leaves no round .*method\.tags = false"):
        small(method__name="fedmlp", training__rounds=rounds, method__t1=t1)
    small(method__name="fedmlp", training__rounds=rounds, method__t1=t1, method__mld=False, method__cr=False)


# The upper bound


def skewed(**changes: Any) -> Experiment:
    return small(
        **{"partition__presence": 0.3, "annotation__kind": "missing", "annotation__missing": 5, "data__limit": 250,
           "partition__server": 0.1, "method__name": "centralized", "model__channels": (4, 12)} | changes
    )  # fmt: skip


def test_upper_bound_has_all_data_and_all_labels(tmp_path: Path) -> None:
    data = federation.build(skewed())
    assert data.report["dropped"] > 0
    engine = LocalEngine(data, tmp_path)
    engine.close()
    client = engine.trainer.client_in_round(data, engine.clients[0], 1)
    assert len(client.data) + len(data.held_out) == 250
    assert not set(client.data.rows) & set(data.held_out.rows)
    assert (client.data.labels >= 0).all()
    assert (data.train.labels < 0).any()
    positions = np.searchsorted(data.source.rows, client.data.rows)
    assert np.array_equal(client.data.labels, data.source.labels[positions])
    assert run(skewed()).summary["samples"]["train"] == len(client.data)


@pytest.mark.parametrize("of", ["fednca-ml", "fedctran", "fedmlp", "fedharmony", "private-fedavg"])
def test_upper_bound_has_the_head_of_its_method(of: str) -> None:
    extra = {"method__loss": "sigmoid"} if of == "private-fedavg" else {}
    bound = run(skewed(method__of=of, training__rounds=3, **extra))
    bounded = run(skewed(method__name=of, training__rounds=3, partition__presence=1.0, **extra))
    assert {name: w.shape for name, w in bound.weights.items()} == {n: w.shape for n, w in bounded.weights.items()}
    assert bound.rows[0]["clients"] == 1
    assert bound.experiment.training.keep == "best"


def test_upper_bound_takes_the_options_of_its_method() -> None:
    experiment = skewed(method__of="fednca-ml", method__tau=0.4)
    assert experiment.method.options["tau"] == 0.4
    assert experiment.method.options["lambda_neg"] == 0.01
    with pytest.raises(ConfigError, match=r"no key 'method\.mu'"):
        skewed(method__of="fednca-ml", method__mu=1)
    with pytest.raises(ConfigError, match="no method 'fednca'"):
        skewed(method__of="fednca")
    with pytest.raises(ConfigError, match="is the method that `centralized` trains"):
        skewed(method__of="centralized")


def test_unknown_target_of_the_source_is_in_no_loss(tmp_path: Path) -> None:
    csv = folder_of_images(tmp_path)
    known = csv.read_text()
    experiment = own_images(tmp_path, method__name="centralized", training__rounds=1)
    csv.write_text(known.replace(",train,0,0,0", ",train,0,0,"))
    assert csv.read_text() != known
    blank = run(experiment).weights
    csv.write_text(known)
    assert not same(blank, run(experiment).weights)


# Methods by name


def test_newest_definition_of_a_method_is_used() -> None:
    def define(text: str) -> type[Method]:
        return type("Mine", (Method,), {"name": "test-notebook", "summary": text, "__module__": "__main__"})

    define("first")
    newest = define("second")
    assert methods.find("test-notebook") is newest
    assert registry.all_of("method")["test-notebook"].summary == "second"


def test_built_in_name_is_refused_for_an_own_method() -> None:
    registry.all_of("method")
    with pytest.raises(ConfigError, match="'fedavg' in __main__ has the name of a built-in method"):
        type("Mine", (Method,), {"name": "fedavg", "__module__": "__main__"})
    assert methods.find("fedavg").__module__ == "fedmll.methods.fedavg"


# Starting, extending, measuring


def test_failed_start_leaves_no_folder(tmp_path: Path) -> None:
    for changes in (
        {"data__name": "folder:nowhere.csv"},
        {"method__name": "fednca-ml", "model__channels": (4, 6)},  # fewer features than classes
        {"engine__device": "cuda"},
    ):
        if changes.get("engine__device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises((DataError, ConfigError)):
            run(small(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    run(small(training__rounds=1), tmp_path / "run")


@pytest.mark.parametrize("method", ["fedavg", "fedmlp"])
def test_extended_run_gives_the_same_bits(tmp_path: Path, method: str) -> None:
    changes = {"method__name": method} | ({"method__t1": 1} if method == "fedmlp" else {})
    run(small(training__rounds=2, **changes), tmp_path / "run")
    hear = Hear()
    longer = resume(tmp_path / "run", rounds=5, callback=hear)
    assert not hear.warnings
    assert same(longer.weights, run(small(training__rounds=5, **changes)).weights)
    assert [row["round"] for row in longer.rows] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 5
    assert Experiment.load(tmp_path / "run" / "experiment.toml").training.rounds == 5
    with pytest.raises(ConfigError, match="has done 5 rounds already"):
        resume(tmp_path / "run", rounds=3)


def test_extending_a_run_warns_about_options_that_depend_on_the_rounds(tmp_path: Path) -> None:
    run(small(method__name="fedmlp", training__rounds=20, engine__evaluate_every=20), tmp_path / "run")
    hear = Hear()
    resume(tmp_path / "run", rounds=30, callback=hear)
    assert "method.first_stage = 2 was set from 20 rounds" in hear.warnings[0]
    assert "a run of 30 rounds from the start would have 3" in hear.warnings[0]


def test_run_killed_while_it_is_extended_can_be_resumed(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", rounds=4, callback=StopIn(4))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert same(resume(tmp_path / "run").weights, run(small(training__rounds=4)).weights)


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_final_model_is_evaluated_once(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    evaluate = LocalEngine.evaluate
    monkeypatch.setattr(LocalEngine, "evaluate", lambda self, m: counted.append(1) or evaluate(self, m))
    result = run(small(method__name=method, training__rounds=3), tmp_path / "run")
    assert len(counted) == 3
    assert result.metrics["macro_auc"] == result.rows[result.summary["round"] - 1]["macro_auc"]


def test_two_processes_cannot_start_in_one_folder(tmp_path: Path) -> None:
    """The second process finds the experiment of the first one, whichever prepared its data faster."""
    out = tmp_path / "run"

    class Meanwhile(Callback):
        def on_run_start(self, *_: Any) -> None:
            child = os.fork()
            if child == 0:
                try:
                    run(small(seed=1), out)
                except ConfigError:
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    assert run(small(), out, callback=Meanwhile()).experiment.seed == 0


# One table, one dataset


def test_comparison_does_not_mix_two_datasets(tmp_path: Path) -> None:
    csv = folder_of_images(tmp_path)

    def compare(*seeds: int) -> ComparisonRunner:
        variants = [parse_variant(name) for name in ("fedavg", "fedprox")]
        plan = ComparisonRunner(
            own_images(tmp_path, training__rounds=1), variants, seeds, ComparisonFolder(tmp_path / "grid")
        )
        plan.read_folders()
        plan.run_all()
        return plan

    compare(0)
    text = csv.read_text()
    csv.write_text("\n".join(text.splitlines()[:-2]) + "\n")
    with pytest.raises(DataError, match="the training data has 46 samples, not 48"):
        compare(0, 1)
    assert not (tmp_path / "grid" / "fedavg" / "seed-1").exists()
    compare(0)  # nothing new comes in: what is finished can still be shown
    csv.write_text(text)
    assert len(compare(0, 1).comparison().finished) == 4
