"""compare: what is planned and refused, what is chosen, what fails, and what the tables say about it.

The grid is tried on runs that are pretended (a score or a failure for each experiment), so that there can be many; the
last tests type the command and train.
"""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Said, small

from fedmll.comparison import compare as compare_module
from fedmll.comparison import tables
from fedmll.comparison.compare import ComparisonCallback, ComparisonRunner
from fedmll.comparison.comparison_folder import ComparisonFolder
from fedmll.comparison.plan import Variant, cross_variants, parse_variant
from fedmll.comparison.results import Comparison, ComparisonCell, main_table, margin_table
from fedmll.config.experiment import Experiment
from fedmll.core.errors import CheckpointError, ClientError, ConfigError, DataError
from fedmll.training.callbacks import Callback

Score = Callable[[Experiment], float]


class World:
    """Runs that are not trained: `score` gives macro_auc (and twice that, as on validation data) or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.ran, self.resumed, self.skipped, self.warnings = out, [], [], [], []
        self.score: Score = lambda experiment: 50.0 + experiment.seed
        self.built: list[Experiment] = []
        self.division: Callable[[Experiment], None] = lambda experiment: None
        self.labels = np.array([[1], [0]])
        monkeypatch.setattr(compare_module, "run", self._run)
        monkeypatch.setattr(compare_module, "resume", self._resume)
        monkeypatch.setattr(compare_module.federation, "build", self._build)

    def _build(self, experiment: Experiment, progress: object) -> Any:
        self.division(experiment)
        self.built.append(experiment)
        return SimpleNamespace(validation=SimpleNamespace(labels=self.labels))

    def _run(self, experiment: Experiment, folder: Path, *, callback: Callback, prepared: object) -> None:
        assert not folder.exists() or not list(folder.iterdir())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text(experiment.to_toml())
        self.ran.append(folder.relative_to(self.out).as_posix())
        self._train(experiment, folder)

    def _resume(self, folder: Path, *, callback: Callback, engine: dict[str, Any], prepared: object) -> None:
        assert engine["workers"] == 0
        self.resumed.append(folder.relative_to(self.out).as_posix())
        self._train(Experiment.load(folder / "experiment.toml"), folder)

    def _train(self, experiment: Experiment, folder: Path) -> None:
        (folder / "metrics.jsonl").write_text('{"round": 1}\n')
        score = self.score(experiment)
        metrics = {"macro_auc": score, "val_macro_auc": 2 * score, "map": None if experiment.seed == 11 else score}
        summary = {"metrics": metrics, "rounds": 2, "seconds": 3.0, "bytes_up": 1_000_000, "bytes_down": 4_000_000}
        (folder / "summary.json").write_text(json.dumps(summary))

    def runner(
        self, methods: str, seeds: list[int], vary: Any = None, tune: Any = None, **rest: Any
    ) -> ComparisonRunner:
        variants = [parse_variant(name) for name in methods.split(",")]
        rows = cross_variants(variants, vary or {})
        folder, callback = ComparisonFolder(self.out), ComparisonCallback()
        callback.on_warning = self.warnings.append  # type: ignore[method-assign]
        callback.on_rounds_skipped = self.skipped.append  # type: ignore[method-assign]
        return ComparisonRunner(small(), rows, seeds, folder, tune=tune, callback=callback, **rest)

    def go(self, methods: str, seeds: list[int], retry: bool = False, **rest: Any) -> Comparison:
        self.ran, self.resumed, self.skipped, self.warnings, self.built = [], [], [], [], []
        return self.runner(methods, seeds, **rest).run_all(retry_failed=retry)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path / "grid")


def diverged(experiment: Experiment) -> float:
    raise ClientError(f"The loss of client c003 became nan in round 2 of seed {experiment.seed}.")


def body(found: Comparison, *metrics: str) -> list[list[str]]:
    return main_table(replace(found, metrics=metrics))[1]


def notes_of(found: Comparison, metrics: Sequence[str]) -> list[str]:
    return replace(found, metrics=metrics).notes


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_rows_change_settings() -> None:
    row = parse_variant("fedprox:mu=0.5+weighting=equal+training.lr=1e-2")
    assert row.label == "fedprox:mu=0.5+weighting=equal+training.lr=1e-2"
    assert row.overrides == {
        "method.name": "fedprox", "method.mu": 0.5, "method.weighting": "equal", "training.lr": 0.01
    }  # fmt: skip
    assert parse_variant("fedavg").overrides == {"method.name": "fedavg"}
    for wrong in ("fedprox:mu", "fedprox:mu=1+weights"):
        with pytest.raises(ConfigError, match="key=value"):
            parse_variant(wrong)
    with pytest.raises(ConfigError, match=r"sets method\.mu twice"):
        parse_variant("fedprox:mu=1+method.mu=2")


def test_vary_makes_a_row_of_every_combination(world: World) -> None:
    vary = {"training.lr": [1e20, 0.2], "training.batch_size": [8, 16, 32]}
    plan = world.runner("fedavg,fedprox:mu=1", [0], vary=vary)
    labels = [variant.label for variant in plan.variants]
    assert labels[:3] == [
        "fedavg:training.lr=1e+20+training.batch_size=8",
        "fedprox:mu=1+training.lr=1e+20+training.batch_size=8",
        "fedavg:training.lr=1e+20+training.batch_size=16",
    ]
    assert len(set(labels)) == 12
    experiments = [plan.cells[label][0][0].experiment for label in labels]
    assert {(e.method.name, e.training.lr, e.training.batch_size) for e in experiments} == {
        (name, lr, size) for name in ("fedavg", "fedprox") for lr in (1e20, 0.2) for size in (8, 16, 32)
    }
    with pytest.raises(ConfigError, match=r"'fedavg:training.lr=1\+training.lr=2' sets training.lr twice"):
        world.runner("fedavg:training.lr=1", [0], vary={"training.lr": [2]})


@pytest.mark.parametrize(
    ("methods", "seeds", "tune", "named"),
    [
        ("fedavg,fedprox,fedavg", [0], None, "'fedavg, seed 0' and 'fedavg, seed 0'"),
        ("fedavg,fedavg:weighting=size", [3], None, "'fedavg, seed 3' and 'fedavg:weighting=size, seed 3'"),
        ("fedavg", [0, 1, 0], None, "'fedavg, seed 0' and 'fedavg, seed 0'"),
        ("fedavg", [0], {"training.lr": [0.1, 0.2, 0.1]}, "'fedavg, lr=0.1, seed 0' and"),
        ("fedavg:training.lr=0.1", [0], {"training.lr": [0.1, 0.2]}, "sets training.lr twice"),
        ("fedavg", [0], {"method.mu": [1, 2]}, "no key 'method.mu'"),
    ],
)
def test_what_is_refused_before_anything_runs(
    world: World, methods: str, seeds: list[int], tune: Any, named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        world.go(methods, seeds, tune=tune)
    assert named in str(error.value)
    assert world.ran == [] and not world.out.exists()


def test_two_rows_never_share_a_folder(world: World) -> None:
    """The folder's name has - for / and :, so that two rows could meet there."""
    with pytest.raises(ConfigError, match=r"twice: .*weights=a/b.*weights=a-b"):
        world.runner("fedavg:model.weights=a/b,fedavg:model.weights=a-b", [0])


def test_each_run_has_a_folder_and_goes_on_there(world: World) -> None:
    seeds = list(range(12))
    found = world.go("fedavg,fedavg:weighting=equal", seeds)
    assert world.ran == [f"{row}/seed-{seed}" for row in ("fedavg", "fedavg-weighting=equal") for seed in seeds]
    assert [cell.seed for cell in found.rows[0].cells] == seeds
    assert world.skipped == []
    (world.out / "fedavg" / "seed-10" / "summary.json").unlink()  # as if it had been killed
    again = world.go("fedavg,fedavg:weighting=equal", seeds)
    assert (world.ran, world.resumed) == ([], ["fedavg/seed-10"])
    assert world.skipped == [2] * 23
    assert body(again, "macro_auc") == body(found, "macro_auc")
    with pytest.raises(ConfigError, match=r"seed-0 holds another experiment \(training\.lr differ\); nothing"):
        ComparisonRunner(small(training__lr=0.5), [Variant("fedavg", {})], seeds, ComparisonFolder(world.out))


def test_data_is_prepared_once_for_all_that_share_it(world: World) -> None:
    world.go("fedavg,fedprox", [4])
    assert [e.seed for e in world.built] == [4]
    world.go("fedavg:partition.beta=0.3,fedavg:partition.beta=0.4,fedavg:partition.beta=0.4+weighting=equal", [4])
    assert [e.partition.beta for e in world.built] == [0.3, 0.4]
    world.go("fedavg:annotation.kind=missing,fedavg:annotation.kind=missing+annotation.missing=1", [5])
    assert len(world.built) == 2
    world.go("fedavg:training.batch_size=8,fedavg:training.batch_size=9", [6, 7])
    assert len(world.built) == 4


# ---- tuning ---------------------------------------------------------------------------------------------------------

RATES = {"training.lr": [0.1, 0.2, 0.3], "training.weight_decay": [0.0, 0.5]}


def best_at(lr: float, decay: float) -> Score:
    return lambda e: 60.0 - abs(e.training.lr - lr) - abs(e.training.weight_decay - decay) + e.seed


def test_the_best_of_all_combinations_goes_on_with_the_other_seeds(world: World) -> None:
    world.score = lambda e: best_at(0.2, 0.0 if e.method.name == "fedavg" else 0.5)(e)
    found = world.go("fedavg,fedprox", [3, 4, 5], tune=RATES)
    assert [row.setting for row in found.rows] == [
        {"training.lr": 0.2, "training.weight_decay": 0.0}, {"training.lr": 0.2, "training.weight_decay": 0.5}
    ]  # fmt: skip
    assert len(world.ran) == 2 * (6 + 2)
    assert world.ran[:6] == [
        f"fedavg/training.lr={lr}+training.weight_decay={decay}/seed-3"
        for lr in (0.1, 0.2, 0.3)
        for decay in (0.0, 0.5)
    ]
    assert world.ran[6:8] == [f"fedavg/training.lr=0.2+training.weight_decay=0.0/seed-{seed}" for seed in (4, 5)]
    assert main_table(replace(found, metrics=["macro_auc"]))[0] == [
        "method",
        "tuned",
        "macro_auc",
        "s/round",
        "MB/round",
    ]
    assert body(found, "macro_auc")[0][:3] == ["fedavg", "lr=0.2, weight_decay=0.0", "64.00 ± 1.00"]
    world.go("fedavg,fedprox", [3, 4, 5], tune=RATES)
    assert world.ran == world.resumed == []


def test_settings_can_be_chosen_on_a_seed_that_the_table_does_not_have(world: World) -> None:
    world.score = best_at(0.2, 0.5)
    plan = world.runner("fedavg", [3, 4], tune=RATES, tune_seed=100)
    assert plan.total_rounds == 8 * small().training.rounds
    found = plan.run_all()
    chosen = "training.lr=0.2+training.weight_decay=0.5"
    assert len(world.ran) == 6 + 2 and all(name.endswith("seed-100") for name in world.ran[:6])
    assert world.ran[6:] == [f"fedavg/{chosen}/seed-{seed}" for seed in (3, 4)]
    assert found.rows[0].values("macro_auc") == {3: 63.0, 4: 64.0}  # the seed of the choice is not in the table
    world.go("fedavg", [3, 4], tune=RATES, tune_seed=100)
    assert world.ran == []
    world.go("fedavg", [3, 4, 5], tune=RATES, tune_seed=4)  # or which it has
    assert world.ran[-1] == f"fedavg/{chosen}/seed-5" and len(world.ran) == 5 + 1
    with pytest.raises(ConfigError, match="with --tune"):
        world.runner("fedavg", [3, 4], tune_seed=100)


def test_of_equal_values_the_first_is_taken(world: World) -> None:
    world.score = lambda e: 50.0
    assert world.go("fedavg", [0], tune=RATES).rows[0].setting == {"training.lr": 0.1, "training.weight_decay": 0.0}


def test_a_value_that_fails_is_not_chosen(world: World) -> None:
    def score(e: Experiment) -> float:
        return diverged(e) if e.training.lr > 0.15 else best_at(0.1, 0.5)(e)

    world.score = score
    found = world.go("fedavg", [0, 1], tune=RATES)
    assert found.rows[0].setting == {"training.lr": 0.1, "training.weight_decay": 0.5}
    assert len(found.failed) == 4 and len(found.runs) == 7
    assert body(found, "macro_auc")[0][2] == "60.50 ± 0.71"  # both seeds of the chosen one are there
    assert "4 of 7 runs failed" in notes_of(found, [])[0]
    assert notes_of(found, [])[1].startswith(
        "failed: fedavg, lr=0.2, weight_decay=0.0, seed 0: The loss of client c003"
    )


def test_a_row_of_which_every_value_fails_is_failed_and_the_others_go_on(world: World) -> None:
    world.score = lambda e: diverged(e) if e.method.name == "fedprox" else best_at(0.2, 0.0)(e)
    plan = world.runner("fedprox,fedavg", [0, 1, 2], tune=RATES)
    found = plan.run_all()
    first, second = body(found, "macro_auc")
    assert first == ["fedprox", "–", "failed", "failed", "failed"]
    assert second[2] == "61.00 ± 1.00"
    assert len(found.runs) == 6 + 6 + 2 and len(found.failed) == 6
    assert not any("not all runs are done" in note for note in notes_of(found, ["macro_auc"]))
    # each of the 8 runs of fedavg does its 2 rounds; the 6 of fedprox break off after one, its other 2 never begin
    assert plan.total_rounds == 2 * (6 + 2) * 2
    assert plan.total_rounds == 8 * 2 + 6 * 1 + sum(world.skipped)
    assert margin_table(replace(found, metrics=["macro_auc"]), "fedprox")[1] == [["fedavg", "failed"]]


@pytest.mark.parametrize(
    ("best", "named"),
    [
        (0.1, "fedavg: its best training.lr, 0.1, is the lowest of the grid"),
        (0.3, "fedavg: its best training.lr, 0.3, is the highest of the grid"),
        (0.2, None),
    ],
)
def test_a_best_value_at_the_edge_is_noted(world: World, best: float, named: str | None) -> None:
    world.score = best_at(best, 0.0)
    found = world.go("fedavg", [0], tune={"training.lr": [0.2, 0.3, 0.1]})
    assert len(notes_of(found, [])) == (named is not None)
    assert all(note.startswith(named or "") for note in notes_of(found, []))


def test_each_of_several_keys_can_be_at_an_edge(world: World) -> None:
    world.score = best_at(0.1, 0.3)
    tune = {"training.lr": [0.1, 0.2, 0.3], "training.weight_decay": [0.0, 0.3, 0.5], "fedprox:mu": [0.5, 1.0]}
    found = world.go("fedavg,fedprox", [0], tune=tune)
    assert [note.partition(" of the grid")[0] for note in notes_of(found, [])] == [
        "fedavg: its best training.lr, 0.1, is the lowest",
        "fedprox: its best training.lr, 0.1, is the lowest",
        "fedprox: its best method.mu, 0.5, is the lowest",
    ]
    assert len(world.ran) == 9 + 18


def test_a_methods_own_keys_are_tried_for_its_rows_alone(world: World) -> None:
    world.score = lambda e: 60.0 + e.seed - (abs(e.method.options["mu"] - 1) if e.method.name == "fedprox" else 0)
    tune = {"fedprox:mu": [0.5, 1.0], "fedprox:training.lr": [0.1, 0.2]}
    plan = world.runner("fedavg,fedprox,fedprox:weighting=equal", [3, 4], tune=tune, tune_seed=9)
    assert plan.total_rounds == (2 + 2 * (4 + 2)) * small().training.rounds
    found = plan.run_all()
    assert world.ran[:2] == ["fedavg/seed-3", "fedavg/seed-4"]  # no setting is chosen for it, and no seed spent on that
    chosen = "method.mu=1.0+training.lr=0.1"
    assert world.ran[6:8] == [f"fedprox/{chosen}/seed-3", f"fedprox/{chosen}/seed-4"]
    assert [row.setting for row in found.rows] == [{}] + 2 * [{"method.mu": 1.0, "training.lr": 0.1}]
    assert [row[1] for row in body(found, "macro_auc")] == ["–", "mu=1.0, lr=0.1", "mu=1.0, lr=0.1"]
    text = tables.tuning_markdown(found)
    assert text.startswith("## fedprox\n") and "## fedprox:weighting=equal\n" in text and "## fedavg" not in text
    assert "| mu=0.5, lr=0.1 | 137.00 |  |" in text and "| mu=1.0, lr=0.1 | 138.00 | chosen |" in text
    assert "val_macro_auc, seed 9" in text
    for wrong, named in (
        ({"fedprx:mu": [1]}, "did you mean 'fedprox'"),
        ({"fedprox:mu": [1], "method.mu": [2]}, "twice"),
    ):
        with pytest.raises(ConfigError, match=named):
            world.runner("fedprox", [0], tune=wrong)


def test_of_two_values_each_is_an_edge(world: World) -> None:
    world.score = best_at(0.1, 0.0)
    assert "0.1, is the lowest" in notes_of(world.go("fedavg", [0], tune={"training.lr": [0.1, 0.2]}), [])[0]


def test_words_and_single_values_have_no_edge(world: World) -> None:
    tune = {"training.optimizer": ["adam", "sgd"], "training.lr": [0.1], "method.weighting": ["size", "equal"]}
    assert notes_of(world.go("fedavg", [0], tune=tune), []) == []


def test_tuning_without_validation_data_is_refused_before_a_run(world: World) -> None:
    for labels in (np.zeros((0, 3)), np.array([[1, -1], [1, 0]])):  # nothing; no class with both
        world.labels = labels
        with pytest.raises(ConfigError, match=rf"val_macro_auc.*{len(labels)} validation samples.*partition.holdout"):
            world.go("fedavg", [0, 1], tune=RATES)
        assert world.ran == []
    world.go("fedavg", [0, 1])  # nobody needs it without --tune
    world.labels = np.array([[1, -1], [0, 0]])  # one class with both is enough
    world.go("fedavg", [2], tune=RATES)
    world.labels = np.zeros((0, 3))  # and the other seeds do not choose
    world.go("fedavg", [2, 1], tune=RATES)
    assert len(world.ran) == 1


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_run_is_shown_remembered_and_left_alone(world: World) -> None:
    world.score = lambda e: diverged(e) if (e.method.name, e.seed) == ("fedprox", 2) else 50.0 + 2 * e.seed
    found = world.go("fedavg,fedprox", [0, 2, 12])
    assert world.ran[-1] == "fedprox/seed-12"  # it went on
    assert world.warnings == [f"failed: fedprox, seed 2: {found.failed[0].failure}"]
    assert body(found, "macro_auc")[0][1] == "59.33 ± 12.86"
    assert body(found, "macro_auc")[1] == [
        "fedprox",
        "62.00 ± 16.97 (2 of 3)",
        "1.50 ± 0.00 (2 of 3)",
        "2.50 ± 0.00 (2 of 3)",
    ]
    assert notes_of(found, ["macro_auc"]) == [
        "1 of 6 runs failed (--retry-failed runs them again):",
        "failed: fedprox, seed 2: The loss of client c003 became nan in round 2 of seed 2.",
    ]
    saved = json.loads((world.out / "fedprox" / "seed-2" / "failed.json").read_text())
    assert saved == {"error": "ClientError", "reason": "The loss of client c003 became nan in round 2 of seed 2."}
    again = world.go("fedavg,fedprox", [0, 2, 12])
    assert world.ran == world.resumed == world.warnings == []
    assert sum(world.skipped) == 12
    assert body(again, "macro_auc") == body(found, "macro_auc") and notes_of(again, []) == notes_of(found, [])


def test_retry_failed_runs_it_again_and_forgets_the_failure(world: World) -> None:
    world.score = diverged
    world.go("fedavg", [0, 1])
    world.score = lambda e: diverged(e) if e.seed == 1 else 50.0
    found = world.go("fedavg", [0, 1], retry=True)
    assert world.resumed == ["fedavg/seed-0", "fedavg/seed-1"]
    assert body(found, "macro_auc")[0][1] == "50.00 (1 of 2)"
    assert not (world.out / "fedavg" / "seed-0" / "failed.json").exists()
    assert (world.out / "fedavg" / "seed-1" / "failed.json").exists()


def test_margins_pair_the_seeds_that_both_finished(world: World) -> None:
    world.score = lambda e: (
        diverged(e)
        if (e.method.name, e.seed) in {("fedavg", 0), ("fedprox", 3)}
        else 50 + e.seed**2 + (e.method.name == "fedprox") * (1 + e.seed)
    )
    found = world.go("fedavg,fedprox", [0, 1, 2, 3])
    header, rows = margin_table(replace(found, metrics=["macro_auc"]), "fedavg")
    assert header == ["margin over fedavg", "macro_auc"]
    assert rows == [["fedprox", "+2.50 ± 0.71 (2 of 4)"]]  # 1 + 1 and 1 + 2


def test_what_is_refused_before_training_is_shown_but_not_remembered(world: World) -> None:
    def refuse(error: Exception) -> Score:
        def score(e: Experiment) -> float:
            if e.seed == 0:
                raise error
            return 50.0

        return score

    for error in (ConfigError("Another process is running"), CheckpointError("it is damaged")):
        world.score = refuse(error)
        found = world.go("fedavg", [0, 1])
        assert [cell.failure for cell in found.failed] == [str(error)]
        assert not list(world.out.rglob("failed.json"))
    world.score = lambda e: 50.0
    assert world.go("fedavg", [0, 1]).failed == []


def test_a_division_that_one_value_does_not_allow_fails_alone(world: World) -> None:
    def division(e: Experiment) -> None:
        if e.partition.clients == 900:
            raise ConfigError("partition.clients = 900 is more than the 160 training samples.")

    world.division = division
    found = world.go("fedavg", [0], vary={"partition.clients": [4, 900, 5]})
    assert [row[1] for row in body(found, "macro_auc")] == ["50.00", "failed", "50.00"]
    assert world.skipped == [2]
    world.division = lambda e: None
    assert world.go("fedavg", [0], vary={"partition.clients": [4, 900, 5]}).failed == []


def test_unreadable_data_and_mistakes_of_ours_are_not_a_run_s_failure(world: World) -> None:
    def unreadable(e: Experiment) -> None:
        raise DataError("The data was not found.")

    world.division = unreadable
    with pytest.raises(DataError):
        world.go("fedavg", [0])
    world.division = lambda e: None

    def mistake(e: Experiment) -> float:
        raise ZeroDivisionError

    world.score = mistake
    with pytest.raises(ZeroDivisionError):
        world.go("fedavg", [0])
    assert not list(world.out.rglob("failed.json"))


# ---- the tables -----------------------------------------------------------------------------------------------------


def test_an_undefined_metric_is_a_dash_with_a_reason(world: World) -> None:
    found = world.go("fedavg", [10, 11])  # the pretended map of seed 11 is null, and accuracy is never there
    assert body(found, "accuracy", "map", "macro_auc")[0][1:4] == ["–", "–", "60.50 ± 0.71"]
    assert notes_of(found, ["accuracy", "map", "macro_auc", "s/round"]) == [
        "accuracy is undefined (–) without test samples that all have exactly one label.",
        "map is undefined (–) without a class with a positive in the test data.",
    ]


def test_a_part_of_the_table_says_so(world: World) -> None:
    def stopped(e: Experiment) -> float:
        if (e.method.name, e.seed) == ("fedprox", 1):
            raise KeyboardInterrupt
        return 50.0

    world.score = stopped
    plan = world.runner("fedavg,fedprox,fedavg-pl", [0, 1])
    with pytest.raises(KeyboardInterrupt):
        plan.run_all()
    found = plan.comparison()
    assert [row[1] for row in body(found, "macro_auc")] == ["50.00 ± 0.00", "50.00 (1 of 2)", "not run"]
    assert notes_of(found, []) == ["not all runs are done: the same command with the same --out continues."]
    assert notes_of(world.runner("fedavg", [0, 1]).comparison(), []) == []
    # what an earlier command finished is in the table before this one comes to it
    world.score = lambda e: 50.0
    world.go("fedavg-pl", [0, 1])
    assert body(world.runner("fedavg,fedprox,fedavg-pl", [0, 1]).comparison(), "macro_auc")[2][1] == "50.00 ± 0.00"


def test_while_tuning_is_not_over_nothing_is_chosen(world: World) -> None:
    def stopped(e: Experiment) -> float:
        if e.training.lr == 0.2:
            raise KeyboardInterrupt
        return 50.0

    world.score = stopped
    plan = world.runner("fedavg", [0], tune={"training.lr": [0.1, 0.2]})
    with pytest.raises(KeyboardInterrupt):
        plan.run_all()
    found = plan.comparison()
    assert body(found, "macro_auc") == [["fedavg", "–", "not run", "not run", "not run"]]
    assert "not all runs are done" in notes_of(found, [])[0]


def test_a_column_is_shown_once(world: World) -> None:
    header, rows = main_table(replace(world.go("fedavg", [0]), metrics=["MB/round", "macro_auc", "macro_auc"]))
    assert header == ["method", "MB/round", "macro_auc", "s/round"]
    assert rows == [["fedavg", "2.50", "50.00", "1.50"]]  # 5 MB and 3 s in 2 rounds; one seed has no spread


def test_a_table_can_say_what_its_rows_are(world: World) -> None:
    names = "fedavg,fed-ridge,fed-ridge:model.weights=/w.safetensors+model.backbone=resnet18"
    found = world.go(names, [0], metrics=["description", "macro_auc"], against="fedavg")
    header, rows = main_table(found)
    assert header == ["method", "macro_auc", "s/round", "MB/round", "description"]
    told = [row[-1] for row in rows]
    assert told[0] == "BCE over all classes, unknown = 0; average by size"
    assert told[1] == told[2] + "; on features of an untrained convnet"
    assert margin_table(found, "fedavg")[0] == ["margin over fedavg", "macro_auc"]
    assert found.notes == []


def test_the_csv_has_every_number_and_every_failure(world: World) -> None:
    world.score = lambda e: diverged(e) if e.seed == 10 or e.training.lr == 0.2 else 50.0 + e.seed
    found = world.go("fedavg", [9, 10, 11], tune={"training.lr": [0.1, 0.2]})
    tables.write_runs_csv(found, world.out / "table.csv")
    with (world.out / "table.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["method", "tuned", "seed", "metric", "value"]
    assert ["fedavg", "training.lr=0.1", "9", "macro_auc", "59.0"] in lines
    assert ["fedavg", "training.lr=0.1", "11", "s/round", "1.5"] in lines
    assert ["fedavg", "training.lr=0.1", "11", "map", "nan"] in lines
    failed = [line[:4] for line in lines if line[3] == "failed"]
    assert failed == [
        ["fedavg", "training.lr=0.2", "9", "failed"], ["fedavg", "training.lr=0.1", "10", "failed"]
    ]  # fmt: skip
    assert len(lines) == 1 + 2 * 5 + 2


# ---- the command ----------------------------------------------------------------------------------------------------

QUICK = [
    "--rounds", "1", "--workers", "0", "--clients", "3", "--set", "data.limit=90", "--set", "model.channels=[4,8]",
    "--set", "training.optimizer=sgd", "--out", "grid",
]  # fmt: skip


@pytest.fixture
def compare(fedmll: Callable[..., Said]) -> Iterator[Callable[..., Said]]:
    before = signal.getsignal(signal.SIGTERM)
    yield partial(fedmll, "compare")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--metrics", "map,macro_acu"], ["no metric 'macro_acu'", "did you mean 'macro_auc'?"]),
        (["--metrics", "zzz"], ["no metric 'zzz'", "known: MB/round, accuracy", "description"]),
        (["--seeds", "0,1,0"], ["--seeds names 0 twice"]),
        (["--seeds", "0,x"], ["--seeds takes whole numbers", "0,x"]),
        (["--methods", "fedavg,fedavg"], ["'fedavg, seed 0' and 'fedavg, seed 0'"]),
        (["--tune", "training.lr"], ["--tune takes section.key=a,b,c", "'training.lr'"]),
        (["--tune", "training.lr="], ["--tune takes section.key=a,b,c"]),
        (["--tune", "fedharmony:beta=1,2"], ["is for 'fedharmony', which is not a row here"]),
        (["--vary", "fedprox:mu=1,2"], ["--vary takes section.key=a,b,c", "'fedprox:mu=1,2'"]),
        (["--track", "tensorbord"], ["no tracker 'tensorbord'", "did you mean 'tensorboard'?"]),
        (["--tune", "training.lr=1,2", "--tune", "training.lr=3"], ["--tune names training.lr twice"]),
        (["--vary", "training.lr=1e-3,1,0.001"], ["--vary training.lr=1e-3,1,0.001 names 0.001 twice"]),
        (["--vary", "training.lr=1,2", "--tune", "training.lr=1,2"], ["sets training.lr twice"]),
    ],
)
def test_bad_options_are_refused_before_any_run(
    compare: Callable[..., Said], tmp_path: Path, words: list[str], named: list[str]
) -> None:
    said = compare(*QUICK, *words)
    assert said.code == 2 and said.error.startswith("error: ") and len(said.error.strip().splitlines()) == 1
    for text in named:
        assert text in said.error
    assert not (tmp_path / "grid").exists()


def test_lists_and_words_are_values(world: World, compare: Callable[..., Said]) -> None:
    world.out = Path("grid")
    said = compare(
        *QUICK, "--methods", "fedavg", "--seeds", "0", "--vary", "model.channels=[4,8],[8,16]",
        "--vary", "method.weighting=size,equal", "--metrics", "macro_auc , s/round",
    )  # fmt: skip
    assert said.code == 0, said.error
    assert sorted(world.ran) == [
        f"fedavg-model.channels=[{a}]+method.weighting={b}/seed-0" for a in ("4, 8", "8, 16") for b in ("equal", "size")
    ]
    assert "fedavg:model.channels=[4, 8]+method.weighting=size" in said.out
    assert [line.split("|")[2:5] for line in Path("grid/table.md").read_text().splitlines()[:1]] == [
        [" macro_auc ", " s/round ", " MB/round "]
    ]


def test_ctrl_c_writes_the_table_of_what_is_finished(world: World, compare: Callable[..., Said]) -> None:
    def stopped(e: Experiment) -> float:
        if e.seed == 1:
            raise KeyboardInterrupt
        return 50.0

    world.out, world.score = Path("grid"), stopped
    said = compare(*QUICK, "--methods", "fedavg,fedprox", "--seeds", "0,1", "--against", "fedavg")
    assert said.code == 130
    assert "the same command with --out grid" in said.error and "grid/table.md" in said.error
    text = Path("grid/table.md").read_text()
    assert "| fedavg | 50.00 (1 of 2) |" in text and "| fedprox | not run |" in text
    assert "\n- not all runs are done: the same command with the same --out continues.\n" in text
    assert "fedavg,,0,macro_auc,50.0" in Path("grid/table.csv").read_text()


def test_stopped_before_anything_is_done_leaves_no_table(world: World, compare: Callable[..., Said]) -> None:
    def unreadable(e: Experiment) -> None:
        raise DataError("The data was not found.")

    world.out, world.division = Path("grid"), unreadable
    said = compare(*QUICK, "--methods", "fedavg", "--seeds", "0")
    assert said.code == 2 and "The data was not found." in said.error
    assert not Path("grid").exists()


def test_a_diverging_row_does_not_stop_the_others(compare: Callable[..., Said]) -> None:
    """Real training: the first row's learning rate makes its weights infinite."""
    words = [*QUICK, "--methods", "fedprox:training.lr=1e38,fedavg", "--seeds", "0,1", "--against", "fedavg"]
    said = compare(*words)
    assert said.code == 0, said.error
    assert "2 of 4 runs failed" in said.out
    assert "failed: fedprox:training.lr=1e38, seed 1: " in said.out
    text = Path("grid/table.md").read_text()
    assert text.startswith("| method | macro_auc | map | macro_f1 | macro_f1_tuned | bacc | s/round | MB/round |\n")
    assert "| fedprox:training.lr=1e38 | failed |" in text and "| fedavg | " in text and "±" in text
    assert "- failed: fedprox:training.lr=1e38, seed 0: " in text and "round 1" in text
    folders = [Path(f"grid/fedprox-training.lr=1e38/seed-{seed}") for seed in (0, 1)]
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert compare(*words).code == 0
    assert [(folder / "log.txt").read_text() for folder in folders] == logs
    assert compare(*words, "--retry-failed").code == 0
    assert all(len((f / "log.txt").read_text()) > len(log) for f, log in zip(folders, logs, strict=True))
    assert Path("grid/table.md").read_text() == text


def test_exit_code_1_if_every_run_failed(compare: Callable[..., Said]) -> None:
    said = compare(*QUICK, "--methods", "fedavg:training.lr=1e38", "--seeds", "0")
    assert said.code == 1
    assert "1 of 1 runs failed" in said.out


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_compare_from_python_is_the_command(world: World) -> None:
    class Watch(compare_module.ComparisonCallback):
        rounds, cells, gone = 0, [], 0  # type: ignore[var-annotated]

        def on_comparison_start(self, rounds: int) -> None:
            self.rounds = rounds

        def on_cell_start(self, cell: ComparisonCell) -> None:
            self.cells.append(str(cell))

        def on_rounds_skipped(self, rounds: int) -> None:
            self.gone += rounds

    watch = Watch()
    found = compare_module.compare(
        small(), ["fedavg", "fedprox:mu=1"], [0, 1], world.out, against="fedavg", metrics=["macro_auc"], callback=watch
    )
    assert (watch.rounds, watch.gone) == (8, 0)
    assert "fedprox:mu=1, seed 1" in watch.cells
    text = (world.out / "table.md").read_text()
    assert text.startswith(repr(found))
    assert "margin over fedavg" in text
    assert "fedprox:mu=1" in found._repr_html_() and found._repr_html_().startswith("<table>")
    assert (world.out / "table.csv").is_file()
    compare_module.compare(small(), ["fedavg", "fedprox:mu=1"], [0, 1], world.out, callback=watch)
    assert watch.gone == 8
    with pytest.raises(ConfigError, match="no metric 'macro_acu'"):
        compare_module.compare(small(), ["fedavg"], [0], world.out, metrics=["macro_acu"])


def test_without_a_folder_the_figures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_module.compare(small(training__rounds=1), ["fedavg"], [0])
    assert len(found.finished) == 1
    assert not found.finished[0].path.exists()
