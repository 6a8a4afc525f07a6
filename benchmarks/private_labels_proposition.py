"""Proposition 1 of private label sets (Breitholtz et al., 2025), in numbers: perfect classifiers of clients that know
only their own labels determine the perfect classifier of all labels, if their label sets overlap.

    python benchmarks/private_labels_proposition.py

A client's perfect classifier is h_k(y|x) = p(y|x) / Σ_{y' ∈ Y_k} p(y'|x). The pairwise conditions
h_k(y) h(y') = h_k(y') h(y) for all y, y' ∈ Y_k are linear in h. Their solutions form a space with one dimension per
connected part of the label sets: with one part, h is p up to its sum, which is 1.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

LABELS, SAMPLES, ZERO = 10, 200, 1e-10
LABEL_SETS = {
    "three labels per client, in a ring": [[k, (k + 1) % LABELS, (k + 2) % LABELS] for k in range(LABELS)],
    "two labels per client, in a chain": [[k, k + 1] for k in range(LABELS - 1)],
    "two labels per client, no overlap": [[k, k + 1] for k in range(0, LABELS, 2)],
}


def pairwise_conditions(p: NDArray[np.float64], label_sets: list[list[int]]) -> NDArray[np.float64]:
    """One row per client and pair of its labels: the coefficients of h."""
    rows = []
    for labels in label_sets:
        own = p[labels] / p[labels].sum()
        for one, other in itertools.combinations(range(len(labels)), 2):
            row = np.zeros(LABELS)
            row[labels[other]], row[labels[one]] = own[one], -own[other]
            rows.append(row)
    return np.array(rows)


def main() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(LABELS), SAMPLES)
    print("| label sets | dimension of the solutions | largest error of h |\n| --- | ---: | ---: |")
    for name, label_sets in LABEL_SETS.items():
        dimensions, errors = set(), []
        for p in probabilities:
            _, values, vectors = np.linalg.svd(pairwise_conditions(p, label_sets))
            dimension = LABELS - int((values > ZERO * values.max()).sum())
            dimensions.add(dimension)
            if dimension == 1:
                errors.append(float(np.abs(vectors[-1] / vectors[-1].sum() - p).max()))
        error = f"{max(errors):.0e}" if errors else "not determined"
        print(f"| {name} | {', '.join(map(str, sorted(dimensions)))} | {error} |")


if __name__ == "__main__":
    main()
