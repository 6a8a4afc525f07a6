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
from fedmll.methods.base import TensorSpec
from fedmll.methods.client_round import ClientInfo, Reply
from fedmll.methods.parts.classifier_rows import own_rows

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


def collect_histograms(
    replies: Sequence[Reply], introductions: Introductions, classes: Sequence[str], private: bool
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
        )
    return sites


def describe_withheld(name: str, site: SiteHistograms) -> list[str]:
    """For the operator: of which classes a site sends no counts, and why."""
    purposes = {"test": "", "validation": " for thresholds"}
    return [
        f"{name} sends no counts{purposes[part]} of {', '.join(classes)}: it holds out fewer than {site.min_count} "
        "positive or negative images of them"
        for part, classes in site.not_sent.items()
        if classes
    ]


def average_metrics(replies: Sequence[Reply], introductions: Introductions, max_share: float) -> ClientReport:
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
    values, weights = {}, np.array(cap_shares(sizes.tolist(), max_share))
    for name, column in (table | validation).items():
        defined = np.isfinite(column)
        values[name] = float(np.average(column[defined], weights=weights[defined])) if defined.any() else np.nan
    indices = np.array([client.index for client, _ in replies])
    return ClientReport(values, {"client": indices, "samples": sizes, **table})
