"""Metrics by site against scikit-learn, on targets that each site knows only in part."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fedmll.evaluation.site_metrics import evaluate_by_site

CLASSES = ("a", "b", "c", "d")
ANNOTATED = {
    "x": np.array([True, True, False, False]),
    "y": np.array([True, False, True, False]),
    "z": np.array([True, False, False, True]),
}


def test_groups_and_their_metrics() -> None:
    rng = np.random.default_rng(0)
    sites = np.repeat(list(ANNOTATED), 40)
    scores = rng.random((120, 4))
    truth = (rng.random((120, 4)) < 0.4).astype(np.int8)
    known = np.stack([ANNOTATED[site] for site in sites])
    targets = np.where(known, truth, -1).astype(np.int8)
    found = evaluate_by_site(scores, targets, sites, CLASSES, ANNOTATED)
    assert [(group["site"], group["only"], group["classes"], group["samples"]) for group in found] == [
        ("x", False, ["a", "b"], 40), ("x", True, ["b"], 40), ("y", False, ["a", "c"], 40), ("y", True, ["c"], 40),
        ("z", False, ["a", "d"], 40), ("z", True, ["d"], 40), (None, False, ["a"], 120),
    ]  # fmt: skip
    of_y = sites == "y"
    aucs = [100 * roc_auc_score(truth[of_y, column], scores[of_y, column]) for column in (0, 2)]
    assert found[2]["metrics"]["macro_auc"] == pytest.approx(np.mean(aucs))
    assert found[3]["metrics"]["macro_auc"] == pytest.approx(aucs[1])
    everywhere = 100 * average_precision_score(truth[:, 0], scores[:, 0])
    assert found[-1]["metrics"]["map"] == pytest.approx(everywhere)


def test_sites_that_share_nothing_have_no_further_groups() -> None:
    annotated = {"x": np.array([True, False]), "y": np.array([False, True])}
    targets = np.array([[1, -1], [0, -1], [-1, 1], [-1, 0]], np.int8)
    found = evaluate_by_site(np.full((4, 2), 0.5), targets, np.array(["x", "x", "y", "y"]), ("a", "b"), annotated)
    assert [(group["site"], group["only"]) for group in found] == [("x", False), ("y", False)]
