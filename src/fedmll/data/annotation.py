"""Which client annotates which classes. Targets of other classes are unknown (-1) at that client, not 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.core.seeding import numpy_generator


def annotate(kind: str, clients: int, classes: int, seed: int, missing: int = 0) -> NDArray[np.bool_]:
    """(K, C) True where a client annotates a class; each class is annotated by some client."""
    known: NDArray[np.bool_] = registry.find("annotation", kind)(clients, classes, seed, missing)
    return known


@register("annotation", "none")
def all_known(clients: int, classes: int, seed: int, missing: int) -> NDArray[np.bool_]:
    """Each client annotates all classes (read-only, needs no memory)."""
    return np.broadcast_to(np.True_, (clients, classes))


@register("annotation", "one-class")
def one_class(clients: int, classes: int, seed: int, missing: int) -> NDArray[np.bool_]:
    """Client i annotates only class i (i modulo C if there are more clients than classes)."""
    if clients < classes:
        raise ConfigError(
            f"annotation.kind = 'one-class' with partition.clients = {clients} leaves class number {clients} "
            f"(counted from 0) of the {classes} without a client that annotates it. Raise partition.clients to "
            f"{classes} or more, or choose another annotation.kind."
        )
    return np.arange(clients)[:, None] % classes == np.arange(classes)


@register("annotation", "missing")
def some_missing(clients: int, classes: int, seed: int, missing: int) -> NDArray[np.bool_]:
    """Each client does not annotate `missing` classes, drawn at random."""
    if not 0 <= missing < classes:
        raise ConfigError(
            f"annotation.missing = {missing} is not possible with {classes} classes: each client must annotate at "
            f"least one. Use 0 to {classes - 1}."
        )
    if clients * (classes - missing) < classes:
        raise ConfigError(
            f"annotation.missing = {missing} lets {clients} clients annotate {classes - missing} classes each: too few "
            f"for all {classes} classes to be annotated. Lower annotation.missing to "
            f"{classes - -(-classes // clients)} or less, or raise partition.clients."
        )
    rng = numpy_generator(seed, "annotate", "missing")
    known = rng.permuted(np.tile(np.arange(classes) >= missing, (clients, 1)), axis=1)
    # A class that no client annotates replaces a class that several clients annotate. Such a class exists, because the
    # clients annotate at least C classes in total and this one is not among them.
    for orphan in np.flatnonzero(~known.any(axis=0)):
        shared_client, shared_class = np.nonzero(known & (known.sum(axis=0) > 1))
        place = rng.integers(len(shared_client))
        known[shared_client[place], [shared_class[place], orphan]] = False, True
    return known
