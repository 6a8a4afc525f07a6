"""Evaluation of the global model at the sites, on their own held-out data.

Each site sends histograms of scores, from which the metrics of all data together are computed, and its own metrics,
which can only be averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedmll.deploy.flower.reply_checks import cap_shares
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.site.worker import TEST_HISTOGRAMS, VALIDATION_HISTOGRAMS
from fedmll.evaluation.histogram_metrics import SiteHistograms, SmallCounts
from fedmll.evaluation.histograms import BINS
from fedmll.evaluation.metric_definitions import ON_VALIDATION
from fedmll.evaluation.metrics import ClientReport
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, Reply
from fedmll.methods.parts.classifier_rows import own_rows

MAX_HELD_OUT_SHARE = 0.5
MIN_SITES = 3  # for this limit

Introductions = Mapping[str, Introduction]  # by site


def evaluation_specs(client: ClientInfo, introduction: Introduction, private: bool) -> dict[str, TensorSpec]:
    """The histograms in a valid reply. A client with private labels knows its own classes only."""
    classes = int(client.owned.sum()) if private else len(client.owned)
    test = introduction.held_out - introduction.validation
    images = {TEST_HISTOGRAMS: test, VALIDATION_HISTOGRAMS: introduction.validation}
    return {name: _histogram_spec(classes, count, None if private else 1) for name, count in images.items() if count}


def _histogram_spec(classes: int, images: int, by_class: int | None) -> TensorSpec:
    return TensorSpec(
        (2, classes, BINS), torch.int32, low=0, high=images,
        rule=lambda counts: int(counts.sum((0, 2)).max()) <= images,
        broken=f"count more images than the {images} that it holds out",
        by_class=by_class,
    )  # fmt: skip


def held_out_weights(names: Sequence[str], introductions: Introductions, max_share: float) -> dict[str, float]:
    """How many held-out images of each site count: its share is at most `max_share`.

    With three sites or more it is also at most a half: no site's word counts more than that of all others together.
    """
    sizes = [introductions[name].held_out for name in names]
    limit = min(max_share, MAX_HELD_OUT_SHARE) if len(names) >= MIN_SITES else max_share
    return dict(zip(names, cap_shares(sizes, limit), strict=True))


def describe_lowered(weights: Mapping[str, float], introductions: Introductions) -> list[str]:
    """For the operator: the sites whose share of the held-out images is too large, and what is done about it."""
    claimed = {name: introductions[name].held_out for name in weights}
    return [
        f"{name} says that it holds out {claimed[name]} images, {claimed[name] / sum(claimed.values()):.1%} of all. In "
        f"metrics and thresholds of all sites together they count as {round(weight)} images, "
        f"{weight / sum(weights.values()):.0%} of all (--max-share)"
        for name, weight in weights.items()
        if weight < claimed[name]
    ]


def collect_histograms(
    replies: Sequence[Reply],
    introductions: Introductions,
    classes: Sequence[str],
    private: bool,
    weights: Mapping[str, float],
) -> dict[str, SiteHistograms]:
    """The histograms of each site, (2, C, BINS), and the classes that it annotates and sent no counts of."""
    sites = {}
    for client, reply in replies:
        rows = own_rows(classes, client.owned) if private else torch.arange(len(classes))
        parts: dict[str, SmallCounts] = {}
        not_sent: dict[str, tuple[str, ...]] = {}
        for part, name in (("test", TEST_HISTOGRAMS), ("validation", VALIDATION_HISTOGRAMS)):
            if name in reply.tensors:
                counts = torch.zeros(2, len(classes), BINS, dtype=torch.int32)
                counts[:, rows] = reply[name]
                missing = client.owned & (counts.sum((0, 2)) == 0)
                parts[part] = counts.numpy()
                not_sent[part] = tuple(classes[row] for row in missing.nonzero().flatten().tolist())
        sites[client.name] = SiteHistograms(
            test=parts["test"],
            validation=parts.get("validation"),
            min_count=introductions[client.name].min_count,
            not_sent=not_sent,
            share_limit=_share_limit(client.name, weights, introductions),
        )
    return sites


def _share_limit(name: str, weights: Mapping[str, float], introductions: Introductions) -> tuple[float, float] | None:
    """See SiteHistograms: the limit of a site whose weight is lower than the number of images that it holds out."""
    lowered = {each for each in weights if weights[each] < introductions[each].held_out}
    if name not in lowered:
        return None
    others = sum(weight for each, weight in weights.items() if each not in lowered)
    return weights[name] / introductions[name].held_out, weights[name] / others if others else 0.0


def describe_withheld(name: str, site: SiteHistograms) -> list[str]:
    """For the operator: of which classes a site sends no counts, and why."""
    purposes = {"test": "", "validation": " for thresholds"}
    return [
        f"{name} sends no counts{purposes[part]} of {', '.join(classes)}: it holds out fewer than {site.min_count} "
        "positive or negative images of them"
        for part, classes in site.not_sent.items()
        if classes
    ]


def average_metrics(
    replies: Sequence[Reply], introductions: Introductions, site_weights: Mapping[str, float]
) -> ClientReport:
    """The sites' own metrics, and their averages by size.

    A metric val_… is computed on the rows for thresholds, where a site has such rows.
    """
    sizes = np.array([introductions[client.name].held_out for client, _ in replies])
    all_names = set.union(*(set(reply.numbers) for _, reply in replies))
    names = sorted(all_names - {f"val_{name}" for name in ON_VALIDATION})
    table = {name: np.array([reply.numbers.get(name, np.nan) for _, reply in replies]) for name in names}
    validation = {
        f"val_{name}": np.array([r.numbers.get(f"val_{name}", r.numbers.get(name, np.nan)) for _, r in replies])
        for name in ON_VALIDATION
        if name in table
    }
    values, weights = {}, np.array([site_weights[client.name] for client, _ in replies])
    for name, column in (table | validation).items():
        defined = np.isfinite(column)
        values[name] = float(np.average(column[defined], weights=weights[defined])) if defined.any() else np.nan
    indices = np.array([client.index for client, _ in replies])
    return ClientReport(values, {"client": indices, "samples": sizes, **table})
