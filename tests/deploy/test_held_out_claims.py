"""A member claims very many held-out images: its share in metrics and thresholds stays limited, and it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, NAMES, Consortium
from evaluation_federation import run_without_server_data
from fake_grid import consortium, fast_polling  # noqa: F401 (fixtures)

from fedmll.core.message import Message
from fedmll.deploy.flower import site_evaluation
from fedmll.deploy.flower.client_app import EVALUATE, HELLO
from fedmll.deploy.introduction import Introduction
from fedmll.evaluation.histogram_metrics import FederatedHistograms, SiteHistograms
from fedmll.evaluation.histograms import BINS, score_histograms
from fedmll.inference.model_file import load_model
from fedmll.training import federated_evaluation
from fedmll.training.callbacks import Result

CLAIM = 20_000_000


def attack(consortium: Consortium, folder: Path, **changes: Any) -> tuple[Result, list[str]]:  # noqa: F811
    """Site b claims 20,000,000 held-out images: its positives have the lowest scores and its negatives the highest."""

    def claim(kind: str, name: str, message: Message, info: dict[str, Any]) -> Message:
        if name != "site-b" or kind not in (HELLO, EVALUATE):
            return message
        if kind == HELLO:
            info["held_out"] = CLAIM
            return Message()
        counts = message["counts"].clone().zero_()
        counts[0, :, 0] = CLAIM // 2
        counts[1, :, -1] = CLAIM // 2
        return Message(message.tensors | {"counts": counts}, message.numbers)

    longer = {"training__rounds": 8, "training__lr": 0.03, **changes}
    result, hear = run_without_server_data(consortium, folder, change_reply=claim, min_count=1, **longer)
    return result, hear.said


def test_a_claim_of_very_many_held_out_images_does_not_decide_metrics_and_thresholds(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    honest, _ = run_without_server_data(
        consortium, tmp_path / "honest", min_count=1, training__rounds=8, training__lr=0.03
    )
    result, said = attack(consortium, tmp_path / "attacked")
    assert honest.metrics["pooled_macro_auc"] > 60
    # at most a half of the positives and of the negatives are the attacker's: (1 − 1/2)² of the pairs are honest
    assert result.metrics["pooled_macro_auc"] > 0.2 * honest.metrics["pooled_macro_auc"]
    named = [text for text in said if "holds out" in text]
    assert named == [
        "site-b says that it holds out 20000000 images, 100.0% of all. In metrics and thresholds of all sites together "
        "they count as 56 images, 50% of all (--max-share)"
    ]
    assert "site-b has joined: 42 images, 20000000 more held out, 10 annotated classes" in said
    sites = json.loads((tmp_path / "attacked" / "out" / "site_metrics.json").read_text())["sites"]
    shipped = load_model(tmp_path / "attacked" / "out" / "model.safetensors").description["thresholds"]
    for place, label in enumerate(CLASSES):
        own = [
            site["by_class"][label]["threshold_own"]
            for name, site in sites.items()
            if name != "site-b" and label in site["chosen_on_own_counts"]
        ]
        assert 0 <= shipped[place] <= 1
        if len(own) == 2:  # site-c does not annotate all classes
            assert odds(min(own)) / np.e <= odds(shipped[place]) <= odds(max(own)) * np.e, label


def introduction(held_out: int) -> Introduction:
    return Introduction(samples=10, held_out=held_out, classes=("a",), digest="0" * 32)


@pytest.mark.parametrize(
    ("sizes", "max_share", "expected"),
    [
        ((30, 30, 40), 1.0, (30, 30, 40)),  # nobody has more than a half
        ((30, 30, CLAIM), 1.0, (30, 30, 60)),
        ((30, 30, CLAIM), 0.4, (30, 30, 40)),
        ((30, CLAIM), 1.0, (30, CLAIM)),  # with two sites nobody can tell
    ],
)
def test_share_of_held_out_images_is_limited(
    sizes: tuple[int, ...], max_share: float, expected: tuple[int, ...]
) -> None:
    said = {name: introduction(size) for name, size in zip("abc", sizes, strict=False)}
    weights = site_evaluation.held_out_weights(list(said), said, max_share)
    assert list(weights.values()) == pytest.approx(expected)
    assert len(site_evaluation.describe_lowered(weights, said)) == (expected != sizes)


def histograms_of(draw: np.random.Generator, count: int, shift: float) -> SiteHistograms:
    targets = (draw.random((count, 1)) < 0.3).astype(np.int8)
    scores = 1 / (1 + np.exp(-(draw.standard_normal(targets.shape) + 3 * targets - 1.5 + shift)))
    counts = score_histograms(scores, targets).astype(np.int32)
    return SiteHistograms(test=counts, validation=None, min_count=1, not_sent={"test": ()})


def odds(threshold: float) -> float:
    return float(threshold / (1 - threshold))


@pytest.mark.parametrize("goal", ["f1", "recall=0.9", "precision=0.8", "conformal_recall=0.9"])
@pytest.mark.parametrize("place", [0, BINS - 1])
def test_thresholds_stay_within_the_range_of_the_other_sites(goal: str, place: int) -> None:
    draw = np.random.default_rng(0)
    sites = {name: histograms_of(draw, 300, shift) for name, shift in zip(NAMES, (0.0, 0.3, 0.6), strict=True)}
    honest = federated_evaluation.choose_common_thresholds(FederatedHistograms(("x",), sites, goal))
    counts = np.zeros((2, 1, BINS), np.int32)
    counts[:, 0, place] = 400
    counts[0, 0, BINS - 1 - place] = 1
    forged = sites | {"forger": SiteHistograms(test=counts, validation=None, min_count=1, not_sent={"test": ()})}
    attacked = federated_evaluation.choose_common_thresholds(FederatedHistograms(("x",), forged, goal))
    own = [
        federated_evaluation.choose_common_thresholds(FederatedHistograms(("x",), {name: site}, goal))
        for name, site in sites.items()
    ]
    assert honest is not None and attacked is not None
    limits = [odds(each.thresholds[0]) for each in own if each is not None]
    widened = float(np.exp(federated_evaluation.MARGIN))
    assert min(limits) / widened <= odds(attacked.thresholds[0]) <= max(limits) * widened
    assert federated_evaluation.find_deciding_sites(FederatedHistograms(("x",), sites, goal)) == {}
