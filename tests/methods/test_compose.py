"""`compose`: which parts a combination has, what is refused, and that every part has an effect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedmll import Method, Part, resume, run
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.methods import config_of
from fedmll.methods.fedharmony import FedHarmony
from fedmll.methods.fedlgt import ClientAwareMask
from fedmll.methods.fedmlp import FedMLP
from fedmll.methods.fednca_ml import FedNcaMl
from fedmll.methods.framework.base import TargetLoss
from fedmll.testing import experiment

MISSING: dict[str, Any] = {
    "annotation__kind": "missing", "annotation__missing": 3, "training__rounds": 3, "partition__clients": 12,
    "data__limit": 240, "partition__minimum": 8, "training__batch_size": 8, "model__channels": (8, 12),
}  # fmt: skip
FUSION = {
    "head": "etf-ladm", "parts": ["prior-adjusted", "rejection", "contrast", "alignment"], "average": "mean",
    "rejection": {"lambda_neg": 1.0},
}  # fmt: skip


def composed(**method: Any) -> Experiment:
    return experiment(**MISSING).changed({"method": {"name": "compose", **method}})


def named(name: str, **options: Any) -> Experiment:
    return experiment(**MISSING).changed({"method": {"name": name, **options}})


def weights_of(experiment: Experiment) -> dict[str, torch.Tensor]:
    return run(experiment).weights


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- the systems are such lists


@pytest.mark.parametrize(
    ("lists", "method"),
    [
        ({"parts": ["unknown-as-negative"]}, ("fedavg", {})),
        ({"parts": ["unknown-as-negative"], "mean": {"weighting": "equal"}}, ("fedavg", {"weighting": "equal"})),
        ({"parts": ["masked"]}, ("fedavg-pl", {})),
        ({"parts": ["unknown-as-negative", "proximal"], "proximal": {"mu": 0.5}}, ("fedprox", {"mu": 0.5})),
        (
            {"head": "etf-ladm", "parts": ["masked", "rejection", "contrast"], "mean": {"weighting": "equal"}},
            ("fednca-ml", {}),
        ),
        ({"head": "ctran", "parts": ["label-mask"]}, ("fedctran", {})),
        (
            {"head": "text-query", "text-query": {"ule": False}, "parts": ["label-mask", "client-aware-mask"],
             "client-aware-mask": {"eps": 0.3}},
            ("fedlgt", {"ule": False, "eps": 0.3}),
        ),
        (
            {"parts": ["tags", "prior-adjusted", "consistency"], "tags": {"first_stage": 1, "positive_share": 1.0},
             "prior-adjusted": {"first_stage": 1}, "consistency": {"first_stage": 1}},
            ("fedmlp", {"first_stage": 1, "positive_share": 1.0}),
        ),
        ({"parts": ["alignment", "unknown-as-negative"], "average": "by-agreement"}, ("fedharmony", {})),
        ({"head": "linear-by-name", "parts": ["masked", "coverage"], "average": "by-label"},
         ("private-fedavg", {"loss": "sigmoid"})),
    ],
)  # fmt: skip
def test_method_equals_its_list_of_parts(lists: dict[str, Any], method: tuple[str, dict[str, Any]]) -> None:
    assert same(weights_of(composed(**lists)), weights_of(named(method[0], **method[1])))


def test_combination_with_one_active_term_is_the_single_method() -> None:
    only_alignment = composed(parts=["alignment", "unknown-as-negative"])
    assert same(weights_of(only_alignment), weights_of(named("fedharmony", aggregation=False)))
    off = composed(**FUSION | {"parts": ["masked", "rejection", "contrast", "alignment"],
                               "alignment": {"strength": 0.0}, "mean": {"weighting": "equal"}})  # fmt: skip
    assert same(weights_of(off), weights_of(named("fednca-ml", lambda_neg=1.0)))
    wpc = composed(parts=["prior-adjusted"])
    assert same(weights_of(wpc), weights_of(named("fedmlp", tags=False, consistency=False)))


@pytest.mark.parametrize(
    "change",
    [
        {"parts": ["masked", "rejection", "contrast", "alignment"]},
        {"parts": ["prior-adjusted", "contrast", "alignment"], "rejection": None},
        {"parts": ["prior-adjusted", "rejection", "alignment"]},
        {"parts": ["prior-adjusted", "rejection", "contrast"]},
        {"average": "by-agreement"},
        {"alignment": {"strength": 30.0}},
    ],
)
def test_combination_has_every_term(change: dict[str, Any], fusion: dict[str, torch.Tensor]) -> None:
    values = {name: value for name, value in (FUSION | change).items() if value is not None}
    changed = weights_of(composed(**values))
    assert not same(changed, fusion)
    assert all(torch.isfinite(tensor.float()).all() for tensor in changed.values())


@pytest.fixture(scope="module")
def fusion() -> dict[str, torch.Tensor]:
    return weights_of(composed(**FUSION))


# ---- what does not go together


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"parts": ["unknown-as-negative", "masked"]}, ["'unknown-as-negative' and 'masked'", "loss of the targets"]),
        ({"parts": ["contrast", "unknown-as-negative"]}, ["'contrast'", "prototypes", "'linear'", "etf-ladm"]),
        ({"parts": ["label-mask"]}, ["'label-mask'", "states", "ctran", "text-query"]),
        ({"parts": ["proximal"]}, ["loss for the known targets", "unknown-as-negative", "masked", "prior-adjusted"]),
        ({"parts": ["unknown-as-negative", "proximal", "proximal"]}, ["'proximal'", "twice"]),
        ({"parts": ["unknown-as-negative", "by-agreement"]}, ["'by-agreement' and 'mean'", "aggregates the weights"]),
        ({"parts": ["unknown-as-negative"], "average": "proximal"}, ["method.average", "proximal"]),
        ({"parts": ["absnt"]}, ["absnt"]),
        ({"head": "etf"}, ["etf-ladm"]),
        ({"parts": ["unknown-as-negative"], "contrast": {"temperature": 1.0}}, ["contrast"]),
        ({"parts": ["unknown-as-negative"], "mean": {"weight": "equal"}}, ["weight"]),
        ({"parts": ["tags", "prior-adjusted"], "tags": {"first_stage": 3}}, ["method.tags.first_stage = 3"]),
        ({"head": "etf-ladm", "parts": ["masked"], "average": "by-label"}, ["'by-label'", "rows"]),
        ({"head": "linear-by-name", "parts": ["masked", "alignment"], "average": "by-label"},
         ["'by-label' and 'correlation'"]),
        ({"parts": ["tags", "prior-adjusted"], "tags": {"first_stage": 1}, "prior-adjusted": {"first_stage": 2}},
         ["method.tags.first_stage, method.prior-adjusted.first_stage", "[1, 2]"]),
        ({"parts": ["prior-adjusted"], "prior-adjusted": {"view": "weka"}}, ["method.prior-adjusted.view", "weak"]),
    ],
)  # fmt: skip
def test_error_names_parts_that_cannot_work_together(method: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        composed(**method)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_inheriting_from_two_methods_drops_nothing_silently() -> None:
    """What a method is stands in its list, not in which class overrides what."""

    class Both(FedHarmony, FedMLP):
        name = "test-both"
        parts = (*FedMLP.parts, FedHarmony.parts[0])

    listed = [part.name for part in Both.recipe(Both.Options()).parts]
    assert listed == ["tags", "prior-adjusted", "consistency", "correlation", "alignment", "by-agreement"]

    class Fused(FedMLP, FedNcaMl):
        name = "test-fused"
        parts = (*FedMLP.parts, *FedNcaMl.parts[1:])

    fused = Fused.recipe(Fused.Options())
    assert (fused.head.name, [part.name for part in fused.parts]) == (
        "etf-ladm", ["tags", "prior-adjusted", "consistency", "rejection", "contrast", "mean"],
    )  # fmt: skip
    assert run(named("test-fused", first_stage=1)).summary["method"] == "test-fused"


def test_different_options_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="both 'rejection' and 'client-aware-mask' have an option 'tau'"):

        class Rivals(FedNcaMl):
            name = "test-rivals"
            parts = (*FedNcaMl.parts, ClientAwareMask)


def test_auto_options_are_resolved_and_recorded(tmp_path: Path) -> None:
    made = composed(**FUSION)
    options = made.method.options
    assert options["prior-adjusted"]["first_stage"] == 1
    assert options["correlation"]["start_round"] == 2
    assert Experiment.make(made.model_dump(exclude_none=True)) == made
    (tmp_path / "e.toml").write_text(made.to_toml())
    assert Experiment.load(tmp_path / "e.toml") == made
    longer = composed(parts=["tags", "prior-adjusted"]).changed({"training.rounds": 40})
    assert longer.method.options["tags"]["first_stage"] == 4
    assert any("method.tags.first_stage = 4" in note for note in longer.notes)
    assert longer.depends_on_rounds(80)["method.tags.first_stage"] == (4, 8)


def test_changing_an_option_copies_the_experiment() -> None:
    base = composed(parts=["masked", "proximal"], proximal={"mu": 0.5})
    assert base.changed({"method.proximal.mu": 9.0}).method.options["proximal"] == {"mu": 9.0}
    assert base.changed({"seed": 1}).method.options["proximal"] == {"mu": 0.5}
    bound = base.changed({"method.name": "centralized", "method.of": "compose"})
    assert bound.method.options["parts"] == ("masked", "proximal")
    assert bound.method.options["proximal"] == {"mu": 0.5}


def test_shared_option_given_for_one_part_applies_to_all() -> None:
    made = composed(parts=["tags", "prior-adjusted", "consistency"], consistency={"first_stage": 2})
    assert {made.method.options[name]["first_stage"] for name in ("tags", "prior-adjusted", "consistency")} == {2}


def test_dependencies_of_dependencies_are_added() -> None:
    class First(Part):
        name = "test-first"

    class Second(Part):
        name = "test-second"
        depends_on = (First,)

    class Third(Part):
        name = "test-third"
        depends_on = (Second,)

    made = composed(parts=["masked", "test-third", "test-first"])
    found = config_of(made).recipe
    assert [part.name for part in found.parts] == ["masked", "test-first", "test-second", "test-third", "mean"]


@pytest.mark.parametrize("name", ["optimizer", "head", "a/b", "a.b"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        type("Named", (Part,), {"name": name})


def test_part_that_provides_the_target_loss_is_a_target_loss() -> None:
    class Plain(TargetLoss):
        name = "test-plain"

        def loss(self, step: Any, round_state: None) -> torch.Tensor:
            return step.logits.square().mean()

    assert run(composed(parts=["test-plain"])).metrics["macro_auc"] >= 0


def test_centralized_training_of_a_combination() -> None:
    bound = experiment(**MISSING).changed({"method": {"name": "centralized", "of": "compose", **FUSION}})
    assert run(bound).summary["method"] == "centralized"


# ---- engines


def test_combination_has_the_same_bits_with_workers_and_after_a_kill(
    tmp_path: Path, fusion: dict[str, torch.Tensor]
) -> None:
    made = composed(**FUSION).changed({"engine.workers": 2})
    file, out = tmp_path / "fusion.toml", tmp_path / "run"
    file.write_text(made.to_toml())
    process = subprocess.Popen([sys.executable, "-m", "fedmll", "run", str(file), "--out", str(out)])
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resume(out)
    kept = load_file(out / "model.safetensors")  # with what is frozen
    assert same({name: kept[name] for name in fusion}, fusion)


def test_methods_describe_themselves() -> None:
    assert [part.name for part in FedNcaMl.recipe(FedNcaMl.Options()).parts] == [
        "masked", "rejection", "contrast", "mean",
    ]  # fmt: skip
    assert Method.name == ""
