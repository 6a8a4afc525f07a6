"""Which clients take part in a round: drawn from the seed and the round number only."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedmll.core.errors import ConfigError
from fedmll.core.seeding import numpy_generator


def choose_clients(
    sizes: ArrayLike,
    round: int,
    seed: int,
    *,
    fraction: float | None = None,
    count: int | None = None,
    sampling: str = "uniform",
) -> NDArray[np.int64]:
    """The numbers of the clients of a round, sorted.

    Args:
        sizes: the number of samples N_k of each client.
        round: the number of the round.
        seed: the experiment's seed.
        fraction: choose ⌈fraction · K⌉ of the K clients.
        count: choose this many clients; takes precedence over `fraction`. With neither, all clients take part.
        sampling: `uniform` (each client has the same chance) or `size` (without replacement, probability ∝ N_k).
    """
    numbers = np.asarray(sizes, dtype=np.float64)
    wanted = _number_of_clients(len(numbers), fraction, count)
    rng = numpy_generator(seed, "participation", round)
    if sampling == "uniform":
        return np.sort(rng.choice(len(numbers), wanted, replace=False))
    # The Gumbel trick: the largest values of log N_k + noise are draws ∝ N_k without replacement. Clients without data
    # come last.
    with np.errstate(divide="ignore"):
        score = np.log(numbers) + rng.gumbel(size=len(numbers))
    return np.sort(np.argsort(-score, kind="stable")[:wanted])


def _number_of_clients(clients: int, fraction: float | None, count: int | None) -> int:
    if clients == 0:
        raise ConfigError("There are no clients to choose from; partition.clients must be 1 or more.")
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
