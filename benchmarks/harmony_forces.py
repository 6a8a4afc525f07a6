"""How strong is FedHarmony's alignment, and whom do its quality weights favour? On COCO's 20 most frequent labels:

    python benchmarks/harmony_forces.py --root DATA [--rounds 8] [--seeds 10,11]

prints, round by round over clients and seeds, the norm of the alignment's gradient λ∇Ψ as a share of that of the
cross-entropy (at the weights a client receives, over its first batches), and the rank correlation over clients of the
discrepancy D_k with the size N_k: where it is positive, exp(−γD) favours small clients.
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
from fedmll.cli.tables import console
from fedmll.client import Batch, Client
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.message import Message
from fedmll.methods.fedharmony import FedHarmony
from fedmll.running.comparison import markdown

BATCHES = 4


def norms(engine: LocalEngine, client: Client, message: Message) -> list[float]:
    """‖λ∇Ψ‖ / ‖∇BCE‖ of a client's first batches."""
    method = engine.method
    assert isinstance(method, FedHarmony)
    method.receive(client.weights, message)
    local = method.prepare(client, message, {})
    if "alignment" not in local:
        return []
    client.model.train()

    def norm(loss: Tensor) -> float:
        grads = torch.autograd.grad(loss, client.weights.parameters, retain_graph=True, allow_unused=True)
        return float(torch.sqrt(sum((g.square().sum() for g in grads if g is not None), torch.zeros(()))))

    shares = []
    batch: Batch
    for _, batch in zip(range(BATCHES), client.batches(), strict=False):
        logits = client.model(batch.images)
        alignment = method.options.strength * local["alignment"](torch.sigmoid(logits))
        shares.append(norm(alignment) / norm(method.entries(logits, batch, local).mean()))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", default="10,11")
    options = parser.parse_args()
    examples = Path(__file__).parents[1] / "examples"
    forces: dict[int, list[float]] = {}
    ranks: dict[int, list[float]] = {}
    for seed in (int(text) for text in options.seeds.split(",")):
        experiment = Experiment.load(examples / "coco20.toml").changed(
            {"data.root": str(options.root), "method.name": "fedharmony", "seed": seed, "engine.workers": 0,
             "training.rounds": options.rounds}
        )  # fmt: skip
        data = federation.build(experiment)
        with tempfile.TemporaryDirectory() as folder:
            engine = LocalEngine(data, Path(folder))
            state = engine.start()
            for number in range(1, options.rounds + 1):
                for peer in engine.peers:
                    client = data.client(peer, number, engine.method, engine.model, engine.weights)
                    forces.setdefault(number, []).extend(norms(engine, client, engine.method.send(state, peer, number)))
                state = engine.method.merge(state, engine.round(state, number), number)
                if "discrepancy" in engine.method.records:
                    sizes, d = engine.method.records["sizes"], engine.method.records["discrepancy"]
                    ranks.setdefault(number, []).append(float(spearmanr(sizes, d).statistic))
            engine.close()
    rows = [
        [str(number), f"{100 * np.median(shares):.2f}", f"{100 * np.min(shares):.2f} – {100 * np.max(shares):.2f}",
         f"{np.mean(ranks[number]):+.2f}"]
        for number, shares in forces.items() if shares
    ]  # fmt: skip
    header = ["round", "‖λ∇Ψ‖ / ‖∇BCE‖, %: median", "range", "rank correlation of D with N"]
    console.print(markdown(header, rows), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
