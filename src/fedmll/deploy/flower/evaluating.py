"""What the sites say of the common model on their own held-out data: the counts that metrics of all of it together
follow from, and their own metrics, which can only be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedmll.client import Peer, Reply
from fedmll.deploy.flower.hearing import capped
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.site_worker import COUNTS, FOR_THRESHOLDS
from fedmll.evaluation.counted import SiteCounts, Small
from fedmll.evaluation.histograms import BINS
from fedmll.evaluation.metrics import ClientReport
from fedmll.evaluation.pooled import VALIDATED
from fedmll.methods.contract import Like
from fedmll.methods.parts.rows import own_rows


def expected_of(peer: Peer, introduced: Introduction, private: bool) -> dict[str, Like]:
    """The counts of a good reply. A client with private labels knows its own classes only."""
    classes = int(peer.owned.sum()) if private else len(peer.owned)
    sizes = {COUNTS: introduced.held_out - introduced.validation, FOR_THRESHOLDS: introduced.validation}
    return {name: _counts(classes, size, None if private else 1) for name, size in sizes.items() if size}


def _counts(classes: int, images: int, by_class: int | None) -> Like:
    return Like(
        (2, classes, BINS), torch.int32, low=0, high=images,
        rule=lambda counts: int(counts.sum((0, 2)).max()) <= images,
        broken=f"are of more images than the {images} that it holds out",
        by_class=by_class,
    )  # fmt: skip


def counted(
    found: Sequence[Reply], here: Mapping[str, Introduction], classes: Sequence[str], private: bool
) -> dict[str, SiteCounts]:
    """The counts of each site, (2, C, BINS), and the classes that it annotates and sent none of."""
    sites = {}
    for peer, reply in found:
        rows = own_rows(classes, peer.owned) if private else torch.arange(len(classes))
        parts: dict[str, Small] = {}
        silent: dict[str, tuple[str, ...]] = {}
        for part, name in (("test", COUNTS), ("validation", FOR_THRESHOLDS)):
            if name in reply.tensors:
                counts = torch.zeros(2, len(classes), BINS, dtype=torch.int32)
                counts[:, rows] = reply[name]
                missing = peer.owned & (counts.sum((0, 2)) == 0)
                parts[part] = counts.numpy()
                silent[part] = tuple(classes[row] for row in missing.nonzero().flatten().tolist())
        sites[peer.name] = SiteCounts(parts["test"], parts.get("validation"), here[peer.name].min_count, silent)
    return sites


def not_sent(name: str, site: SiteCounts) -> list[str]:
    """What is said of it."""
    purposes = {"test": "", "validation": " for thresholds"}
    return [
        f"{name} sends no counts{purposes[part]} of {', '.join(classes)}: it holds out fewer than {site.min_count} "
        "images with, or without, them"
        for part, classes in site.not_sent.items()
        if classes
    ]


def averaged(found: Sequence[Reply], introductions: Mapping[str, Introduction], max_share: float) -> ClientReport:
    """The sites' own metrics, and their means by size. val_…: of the rows that are for thresholds, where a site has
    some apart."""
    sizes = np.array([introductions[peer.name].held_out for peer, _ in found])
    every = set.union(*(set(reply.numbers) for _, reply in found))
    names = sorted(every - {f"val_{name}" for name in VALIDATED})
    table = {name: np.array([reply.numbers.get(name, np.nan) for _, reply in found]) for name in names}
    validated = {
        f"val_{name}": np.array([r.numbers.get(f"val_{name}", r.numbers.get(name, np.nan)) for _, r in found])
        for name in VALIDATED
        if name in table
    }
    values, weights = {}, np.array(capped(sizes.tolist(), max_share))
    for name, column in (table | validated).items():
        defined = np.isfinite(column)
        values[name] = float(np.average(column[defined], weights=weights[defined])) if defined.any() else np.nan
    places = np.array([peer.index for peer, _ in found])
    return ClientReport(values, {"client": places, "samples": sizes, **table})
