"""How strong is FedHarmony's alignment loss, and which clients do its quality weights favour?

    python benchmarks/fedharmony_gradients.py --root DATA [--rounds 8] [--seeds 10,11]

The data is COCO with its 20 most frequent labels. The table has one row per round, over all clients and seeds:

- the norm of the gradient of the alignment loss, λ∇Ψ, as a share of the norm of the gradient of the cross-entropy. Both
  are computed at the weights that a client receives, on its first batches;
- the rank correlation, over clients, of the discrepancy D_k with the size N_k. If it is positive, exp(−γD) favours
  small clients.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from fedmll import Experiment
from fedmll.cli.output import console
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.methods.fedharmony import CorrelationAlignment
from fedmll.methods.framework.client_round import Client, TrainStep
from fedmll.runs.formatting import markdown_table
from fedmll.testing import aggregate, start_round

BATCHES = 4  # per client and round


def gradient_ratios(engine: LocalEngine, client: Client, message: Message) -> list[float]:
    """‖λ∇Ψ‖ / ‖∇BCE‖ on the first batches of a client. Empty in a round without a consensus."""
    trainer, method = engine.trainer, engine.method
    trainer.receive(message)
    client_round = start_round(trainer, client, message)
    alignment, target_loss = method.part(CorrelationAlignment), method.target_loss
    states = client_round.round_states
    if states[alignment.name] is None:
        return []

    def gradient_norm(loss: Tensor | None) -> float:
        assert loss is not None
        grads = torch.autograd.grad(loss, client.weights.parameters, retain_graph=True, allow_unused=True)
        return float(torch.sqrt(sum((g.square().sum() for g in grads if g is not None), torch.zeros(()))))

    ratios = []
    for _, batch in zip(range(BATCHES), client.batches(), strict=False):
        step = TrainStep(client_round, batch)
        for part in trainer.batch_transforms:
            part.transform_batch(step, states[part.name])
        norms = [gradient_norm(part.loss(step, states[part.name])) for part in (alignment, target_loss)]
        ratios.append(norms[0] / norms[1])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the data folder")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", default="10,11", help="separated by commas")
    options = parser.parse_args()
    examples = Path(__file__).parents[1] / "examples"
    ratios: dict[int, list[float]] = {}  # by round
    rank_correlations: dict[int, list[float]] = {}  # by round
    for seed in (int(text) for text in options.seeds.split(",")):
        experiment = Experiment.load(examples / "coco20.toml").changed(
            {"data.root": str(options.root), "method.name": "fedharmony", "seed": seed, "engine.workers": 0,
             "training.rounds": options.rounds}
        )  # fmt: skip
        data = federation.build(experiment)
        with tempfile.TemporaryDirectory() as folder:
            engine = LocalEngine(data, Path(folder))
            method, state = engine.method, engine.initial_state()
            for number in range(1, options.rounds + 1):
                for info in engine.clients:
                    client = engine.trainer.client_in_round(engine.federation, info, number)
                    message = method.send(state, info, number)
                    ratios.setdefault(number, []).extend(gradient_ratios(engine, client, message))
                state, records = aggregate(method, state, engine.collect_replies(state, number), number)
                if "discrepancy" in records:
                    correlation = spearmanr(records["sizes"], records["discrepancy"]).statistic
                    rank_correlations.setdefault(number, []).append(float(correlation))
            engine.close()
    rows = [
        [str(number), f"{100 * np.median(found):.2f}", f"{100 * np.min(found):.2f} – {100 * np.max(found):.2f}",
         f"{np.mean(rank_correlations[number]):+.2f}"]
        for number, found in ratios.items() if found
    ]  # fmt: skip
    header = ["round", "‖λ∇Ψ‖ / ‖∇BCE‖, %: median", "range", "rank correlation of D with N"]
    console.print(markdown_table(header, rows), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
