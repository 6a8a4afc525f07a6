"""What the sites say of the common model on their own held-out data: the counts that metrics of all of it together
follow from, and their own metrics, which can only be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.client import Peer, Reply
from fedmll.deploy.flower.hearing import capped
from fedmll.deploy.flower.roster import Introduction
from fedmll.deploy.site_worker import COUNTS, SMALLEST_COUNT
from fedmll.evaluation.histograms import BINS
from fedmll.evaluation.metrics import ClientReport
from fedmll.methods.contract import Like
from fedmll.methods.parts.rows import own_rows


def expected_of(peer: Peer, held_out: int, private: bool) -> dict[str, Like]:
    """The counts of a good reply. A client with private labels knows its own classes only."""
    classes = int(peer.owned.sum()) if private else len(peer.owned)
    counts = Like(
        (2, classes, BINS), torch.int64, low=0, high=held_out,
        rule=lambda counts: int(counts.sum((0, 2)).max()) <= held_out,
        broken=f"are of more images than the {held_out} that it holds out",
        by_class=None if private else 1,
    )  # fmt: skip
    return {COUNTS: counts}


def summed(found: Sequence[Reply], classes: Sequence[str], private: bool) -> tuple[NDArray[np.int64], dict[str, str]]:
    """The counts of all sites together (2, C, BINS); and by client's name the classes that it annotates and sent no
    counts of."""
    total = torch.zeros(2, len(classes), BINS, dtype=torch.int64)
    silent = {}
    for peer, reply in found:
        counts = torch.zeros_like(total)
        rows = own_rows(classes, peer.owned) if private else torch.arange(len(classes))
        counts[:, rows] = reply[COUNTS]
        total += counts
        missing = peer.owned & (counts.sum((0, 2)) == 0)
        if missing.any():
            silent[peer.name] = ", ".join(classes[row] for row in missing.nonzero().flatten().tolist())
    return total.numpy(), silent


def no_counts(name: str, classes: str) -> str:
    return (
        f"{name} sends no counts of {classes}: it holds out fewer than {SMALLEST_COUNT} images with, or without, them"
    )


def averaged(found: Sequence[Reply], introductions: Mapping[str, Introduction], max_share: float) -> ClientReport:
    """The sites' own metrics, and their means by size."""
    sizes = np.array([introductions[peer.name].held_out for peer, _ in found])
    names = sorted(set.union(*(set(reply.numbers) for _, reply in found)))
    table = {name: np.array([reply.numbers.get(name, np.nan) for _, reply in found]) for name in names}
    values, weights = {}, np.array(capped(sizes.tolist(), max_share))
    for name, column in table.items():
        defined = np.isfinite(column)
        values[name] = float(np.average(column[defined], weights=weights[defined])) if defined.any() else np.nan
    places = np.array([peer.index for peer, _ in found])
    return ClientReport(values, {"client": places, "samples": sizes, **table})
