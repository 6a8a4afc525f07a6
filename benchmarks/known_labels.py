"""Do known labels improve the prediction of the others? C-Tran's interactive mode on held-out images.

For every test image the model gets a random half of the labels. The mean average precision of the other half is
compared with that of the same entries when the model gets no labels.

    python benchmarks/known_labels.py --data coco2014.npz          # any `packed:` file of multi-label images
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from fedmll.config.experiment import Experiment
from fedmll.core.seeding import numpy_generator
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.evaluation import metrics
from fedmll.methods.framework.client_round import EVALUATION_BATCH
from fedmll.testing import aggregate


def main() -> None:
    options = arguments()
    experiment = Experiment.make(
        {
            "seed": options.seed,
            "data": {"name": f"packed:{options.data}", "size": options.size},
            "partition": {"kind": "iid", "clients": options.clients, "holdout": 0.0},
            "method": {"name": options.method},
            "training": {
                "rounds": options.rounds,
                "batch_size": options.batch,
                "optimizer": "adam",
                "lr": options.lr,
                "weight_decay": 0.0,
                "clip": 10.0,
                "augment": "flip",
            },
            "engine": {"workers": options.workers},
        }
    )
    data = federation.build(experiment)
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(data, Path(folder))
        try:
            state = engine.initial_state()
            for number in range(1, options.rounds + 1):
                state, _ = aggregate(engine.method, state, engine.collect_replies(state, number), number)
                if number % options.every == 0 or number == options.rounds:
                    engine.trainer.receive(engine.method.final_model(state))
                    without, with_known = compare(engine, options.seed)
                    print(
                        f"round {number}: no labels known {without:.2f}, half of them known {with_known:.2f}",
                        flush=True,
                    )
        finally:
            engine.close()
    print(
        f"{options.method}, {len(data.test)} held-out images, seed {options.seed}: mAP of the unknown half "
        f"{without:.2f} → {with_known:.2f} ({with_known - without:+.2f})"
    )


def compare(engine: LocalEngine, seed: int) -> tuple[float, float]:
    """mAP of one half of the labels: without known labels, and with the other half known."""
    data, trainer = engine.federation.test, engine.trainer
    is_known = numpy_generator(seed, "given").random(data.labels.shape).argsort(1) < data.labels.shape[1] // 2
    known = np.where(is_known, data.labels, np.int8(-1))
    targets = np.where(is_known, np.int8(-1), data.labels)
    scores = []
    for states in (np.full_like(known, -1), known):
        parts = []
        trainer.model.eval()
        with torch.inference_mode():
            for start in range(0, len(data), EVALUATION_BATCH):
                rows = slice(start, start + EVALUATION_BATCH)
                images = trainer.task.preprocess(trainer.task.tensor(data.samples(rows)))
                parts.append(trainer.method.predict(trainer.model, images, torch.from_numpy(states[rows])))
        scores.append(metrics.evaluate(torch.cat(parts).numpy(), targets, data.classes).values["map"])
    return scores[0], scores[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="a packed file with test images, e.g. of MS-COCO")
    parser.add_argument("--method", default="fedlgt", choices=("fedctran", "fedlgt"))
    parser.add_argument("--rounds", default=4, type=int)
    parser.add_argument("--every", default=2, type=int, help="rounds between two evaluations")
    parser.add_argument("--clients", default=2, type=int)
    parser.add_argument("--size", default=64, type=int, help="side of the images in pixels")
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--batch", default=32, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--workers", default=1, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
