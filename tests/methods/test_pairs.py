"""Each method's parts with the ETF head, with a frozen backbone (kept tokens), and with a loss for missing labels: that
works, or is refused by name. The table says which; a method without a row fails."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from all_methods import names, settings_of
from builders import same_bits
from conftest import small

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.registry import find as find_piece
from fedmll.data.federation import Federation, build
from fedmll.methods import find
from fedmll.models.class_attention import PrototypeClassifier
from fedmll.testing import make_trainer
from fedmll.training.round_loop import run

WORKS = None


class Row(NamedTuple):
    """WORKS, or what the refusal says (a pattern)."""

    etf: str | None = WORKS
    frozen: str | None = WORKS
    loss: str | None = WORKS


STATES = "'label-mask' requires a network that can be given the known states of some labels .*the head 'etf-ladm'"
ROWS = "requires a linear classifier with one row of weights per class .*the head 'etf-ladm'"


def taught_by(part: str) -> str:
    """The refusal of a loss that defines the loss of unknown targets."""
    return f"training.loss = 'em' defines the loss of unknown targets, and so does the part '{part}'"


PAIRS: dict[str, Row] = {
    "cbafed": Row(loss=taught_by("adaptive-labels")),
    "centralized": Row(),
    "compose": Row(),
    "condist": Row(loss=taught_by("distillation")),
    "fed-ridge": Row(etf=f"'ridge' {ROWS}", loss="training.loss = 'em' would change nothing: fed-ridge"),
    "fed-logistic": Row(etf=f"'logistic' {ROWS}", loss="training.loss = 'em' would change nothing: fed-logistic"),
    "fedavg": Row(),
    "fedavg-pl": Row(),
    "fedctran": Row(etf=STATES),
    "fedcurv": Row(),
    "fedfixmatch": Row(loss=taught_by("fixmatch")),
    "fedharmony": Row(),
    "fedirm": Row(loss=taught_by("relation-matching")),
    "fedlgt": Row(etf=STATES),
    "fedlsr": Row(loss=taught_by("self-regularised")),
    "fedmlp": Row(loss=taught_by("prior-adjusted")),
    "fednca-ml": Row(),
    "fednoro": Row(loss=taught_by("noise-robust")),
    "fednova": Row(),
    "fedprox": Row(),
    "fedrdn": Row(frozen="pixels"),
    "fedvls": Row(loss=taught_by("prior-shifted")),
    "local-only": Row(),
    "private-fedavg": Row(etf=f"'by-label' {ROWS}"),
    "private-fedprox": Row(etf=f"'by-label' {ROWS}"),
    "rscfed": Row(loss=taught_by("mean-teacher")),
    "scaffold": Row(),
    "spherefed": Row(
        etf="requires features of norm 1",
        frozen="there is nothing to train",
        loss="'squared-error' has its own",
    ),
    "surgical": Row(etf=ROWS),
}

MISSING = {"annotation__kind": "missing", "annotation__missing": 4}
SETTING = MISSING | {"training__rounds": 2, "model__channels": (4, 12), "engine__evaluate_every": 9}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build(small(**SETTING))


def row_of(name: str) -> Row:
    if name not in PAIRS:
        pytest.fail(f"'{name}' has no row in PAIRS of tests/methods/test_pairs.py: say there what it works with.")
    return PAIRS[name]


def refused(expected: str | None, **changes: Any) -> bool:
    """Whether it is, as it should be, before anything is trained or even read."""
    if expected is WORKS:
        return False
    with pytest.raises(ConfigError, match=expected):
        small(**SETTING | changes)
    return True


def fused(name: str) -> dict[str, Any]:
    """The method's parts and average with the ETF head, as configuration, with the options that it gives them."""
    made = small(**SETTING | settings_of(name))
    method = find(made.method.options.get("of", name))
    config = method.configure(made.method.options if method.name == name else {})
    components = config.components[1:]
    *parts, average = [component for component, _ in components]
    tables = {component.name: table.model_dump() for component, table in components if component.Options.model_fields}
    fusion = {"head": "etf-ladm", "parts": [part.name for part in parts], "average": average.name, **tables}
    training = {key: value for key, value in settings_of(name).items() if key.startswith("training__")}
    return {"method": {"name": "compose"} | fusion} | training


def trained(experiment: Experiment, federation: Federation) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The common model's weights, and each round's loss: where every client is alone, that alone shows its training."""
    result = run(experiment, prepared=federation)
    losses = [row["loss"] for row in result.rows if "loss" in row]
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in result.weights.values())
    assert all(map(math.isfinite, losses))
    return result.weights, losses


def same(first: Any, second: Any) -> bool:
    return same_bits(first[0], second[0]) and first[1] == second[1]


@pytest.mark.parametrize("name", names())
def test_with_the_etf_head(name: str, federation: Federation) -> None:
    fusion = fused(name)
    if refused(row_of(name).etf, **fusion):
        return
    experiment = small(**SETTING | fusion)
    trainer = make_trainer(experiment, federation.train.classes, federation.train.sample_shape, clients=4)
    assert isinstance(trainer.model, PrototypeClassifier)
    assert {part.name for part in trainer.method.active_parts} >= {
        *fusion["method"]["parts"],
        fusion["method"]["average"],
    }
    plain = trained(small(**SETTING, method={"name": "compose", "head": "etf-ladm"}), federation)
    result = trained(experiment, federation)
    assert same(result, plain) == (name in ("fedavg", "compose"))  # whose parts are no others


@pytest.mark.parametrize("name", names())
def test_with_a_frozen_backbone(name: str, federation: Federation) -> None:
    changes = settings_of(name) | {"model__freeze": "backbone", "model__weights": "random"}
    if refused(row_of(name).frozen, **changes):
        return
    experiment = small(**SETTING | changes)
    trainer = make_trainer(experiment, federation.train.classes, federation.train.sample_shape, clients=4)
    assert trainer.with_frozen_features(federation.with_experiment(experiment)).train.tokens is not None
    before = trainer.weights.named(trainer.weights.dump())
    after, losses = trained(experiment, federation)
    assert not any(tensor.startswith("backbone.blocks") for tensor in after)  # it is no weight
    assert not same_bits(after, before) or losses[0] != losses[1]


@pytest.mark.parametrize("name", names())
def test_with_a_loss_for_missing_labels(name: str, federation: Federation) -> None:
    if refused(row_of(name).loss, training__loss="em", **settings_of(name)):
        return
    with_it = trained(small(**SETTING | settings_of(name) | {"training__loss": "em"}), federation)
    plain = trained(small(**SETTING | settings_of(name)), federation)
    assert same(with_it, plain) == (name in NOTHING_UNKNOWN)


NOTHING_UNKNOWN = ("centralized", "private-fedavg", "private-fedprox")  # every label there; its own labels alone


def test_table_names_existing_parts() -> None:
    for name in names():
        for expected in row_of(name):
            for word in (expected or "").split("'")[1::2]:
                if word not in ("em", "etf-ladm"):
                    assert find_piece("part", word)
