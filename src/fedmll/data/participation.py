"""Which clients take part in a round: a function of the seed and the round alone, whatever ran before."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedmll.errors import ConfigError
from fedmll.seeding import numpy_generator


def choose(
    sizes: ArrayLike,
    round: int,
    seed: int,
    *,
    fraction: float | None = None,
    count: int | None = None,
    sampling: str = "uniform",
) -> NDArray[np.int64]:
    """The clients of a round, sorted. `sizes` is N_k of every client.

    `count` wins over `fraction` ρ, which is ⌈ρK⌉ clients; with neither, all take part. `uniform` gives every client the
    same chance; `size` draws without replacement with probability ∝ N_k.
    """
    numbers = np.asarray(sizes, dtype=np.float64)
    wanted = _how_many(len(numbers), fraction, count)
    rng = numpy_generator(seed, "participation", round)
    if sampling == "uniform":
        return np.sort(rng.choice(len(numbers), wanted, replace=False))
    # The largest of log N_k + Gumbel noise are distributed as draws ∝ N_k, one after the other, without replacement.
    # Clients without data come last.
    with np.errstate(divide="ignore"):
        score = np.log(numbers) + rng.gumbel(size=len(numbers))
    return np.sort(np.argsort(-score, kind="stable")[:wanted])


def _how_many(clients: int, fraction: float | None, count: int | None) -> int:
    if clients == 0:
        raise ConfigError("There is no client to choose from; partition.clients must be 1 or more.")
    if count is not None:
        if not 1 <= count <= clients:
            raise ConfigError(
                f"participation.count = {count} is not possible with {clients} clients; use 1 to {clients}."
            )
        return count
    if fraction is None:
        return clients
    # In decimal: 0.07 · 100 is 7, where binary floats give 7.000000000000001 and so 8.
    return int((Decimal(str(fraction)) * clients).to_integral_value(ROUND_CEILING))
