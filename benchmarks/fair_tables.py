"""The tables of docs/results: every method on the same frozen features, with the same budget for tuning.

    python benchmarks/fair_tables.py coco80 --root DATA              tune, run three seeds, write the table
    python benchmarks/fair_tables.py coco80 --root DATA --rows a,b   only rows whose names begin so
    python benchmarks/fair_tables.py picture                         mAP against megabytes, from results.csv

The learning rate of a row is the best of at least four rates, by the AUC on the validation data of a seed that is not
in the table. If the best rate is the lowest or the highest one, the next rate is tried too, until the best rate lies
between two others. A rate whose run fails counts as a worse one. A stopped command continues where it was.

DIR/TABLE/fair-table.md has the table, DIR/results.csv one line per run, with its settings.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.compare import ComparisonCallback, compare
from fedmll.comparison.results import Comparison, ComparisonCell, ComparisonRow
from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import flatten
from fedmll.core.registry import find
from fedmll.evaluation.metric_definitions import SELECTION
from fedmll.runs.formatting import markdown_table

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS, TUNE_SEED = (0, 1, 2), 100
RATES = [float(f"{digit}e{power}") for power in range(-6, 3) for digit in (1, 3)]  # 1e-6, 3e-6, 1e-5, … 300
FIRST_RATES = {"adamw": 3e-4, "sgd": 3e-2}  # the lowest of the first four
METRICS = ("map", "macro_auc", "macro_f1_tuned", "bacc")
COLUMNS = ("table", "row", "lr", "seed", "in_table", *METRICS, "val_map", "val_macro_auc", "MB_up", "MB_down",
           "cpu_seconds", "failure", "settings")  # fmt: skip

MEAN = "+model.stages=[]+model.power=none+model.flip_average=false"
SGD = "training.optimizer=sgd+training.momentum=0"
BASELINES = [
    "fedavg", "fedprox", f"fedavg:{SGD}", f"fednova:{SGD}", f"scaffold:{SGD}", "fedcurv", "fedharmony", "surgical",
    "fedvls", "private-fedavg:loss=sigmoid",
]  # fmt: skip
EXACT = ["fed-ridge", "fed-logistic", "fed-logistic:products=48"]
BOUNDS = ["local-only", "centralized:engine.evaluate_every=1"]
PARTIAL = [
    "local-only", "fedavg", "fedavg-pl", "fedprox", "fedmlp:mld=false+cr=false", "fedmlp", *EXACT,
    "rscfed", "fedfixmatch", "fedirm", "cbafed", "fedlsr", "fednoro", "surgical", "fedvls", "condist",
    "centralized:engine.evaluate_every=1",
]  # fmt: skip


@dataclass(frozen=True)
class FairTable:
    """A table: the example file, what it changes, its rows, and the row that margins are computed over."""

    example: str
    rows: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    against: str = "fedavg"


def neck(width: int) -> list[str]:
    """Rows with a trained neck. Only there does the exact refit depend on what was trained before."""
    rows = ("fedavg", "fedavg:refit=ridge", "fedavg:refit=logistic", "spherefed", "centralized:engine.evaluate_every=1")
    return [f"{row}{'+' if ':' in row else ':'}model.width={width}" for row in rows]


def token_heads(width: int) -> list[str]:
    return [f"{method}:model.width={width}" for method in ("fednca-ml", "fedctran", "fedlgt")]


def mean_rows(rows: Iterable[str]) -> list[str]:
    """The same rows on the mean of the last stage only."""
    return [row + (MEAN if ":" in row else f":{MEAN[1:]}") for row in rows]


COCO80 = ["fedavg", *EXACT, *BOUNDS]

MISSING = {"annotation.kind": "missing", "annotation.missing": 4}
CHEST = {"data.name": "packed:chestxray14_part001_112jpeg.npz"}
TABLES = {
    "coco80": FairTable(
        "coco80-frozen",
        [*COCO80, *mean_rows(row for row in COCO80 if row != "local-only"), *BASELINES[1:], *neck(128),
         *token_heads(64)],
    ),
    "coco20": FairTable(
        "coco80-frozen", [*BOUNDS, *BASELINES, *EXACT, *neck(128), *token_heads(64)],
        {"data.top_classes": 20},
    ),
    "coco8-one-class": FairTable("coco8-frozen", PARTIAL, against="fedavg-pl"),
    "coco8-half-missing": FairTable("coco8-frozen", PARTIAL, MISSING, against="fedavg-pl"),
    "cifar10": FairTable(
        "ml-cifar10-frozen", [*BOUNDS, *BASELINES, *EXACT, *neck(64), "fednca-ml", *token_heads(64)],
        {"model.width": None},
    ),
    "chestxray14": FairTable("coco8-frozen", PARTIAL, CHEST, against="fedavg-pl"),
}  # fmt: skip


class ResultsFile(ComparisonCallback):
    """Adds a line to results.csv after each run, with the CPU seconds of this process."""

    def __init__(self, path: Path, table: str) -> None:
        self.path, self.table, self.begin = path, table, 0.0

    def on_cell_start(self, cell: ComparisonCell) -> None:
        self.begin = time.process_time()

    def on_warning(self, text: str) -> None:
        print(text, flush=True)

    def on_cell_end(self, cell: ComparisonCell) -> None:
        seconds, summary = time.process_time() - self.begin, cell.summary or {}
        row, lr = split_rate(cell.variant.label)
        metrics = summary.get("metrics", {})
        line = {
            "table": self.table, "row": row, "lr": lr, "seed": cell.seed, "in_table": int(cell.seed in SEEDS),
            **{name: f"{metrics[name]:.4f}" for name in (*METRICS, "val_map", "val_macro_auc") if name in metrics},
            **{f"MB_{way}": f"{summary[f'bytes_{way}'] / 1e6:.3f}" for way in ("up", "down") if summary},
            "cpu_seconds": f"{seconds:.1f}", "failure": cell.failure or "", "settings": describe(cell.experiment),
        }  # fmt: skip
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(line)
        print(f"{cell}: map {line.get('map')} auc {line.get('macro_auc')} val {line.get('val_macro_auc')}, "
              f"{seconds:.1f} s {line['failure']}", flush=True)  # fmt: skip


def describe(experiment: Experiment) -> str:
    """All settings that are not the defaults, without folders of this machine."""
    defaults, found = flatten(Experiment().model_dump()), flatten(experiment.model_dump())
    left_out = ("data.root", "model.weights", "engine", "seed")
    changed = [f"{key}={value}" for key, value in found.items()
               if defaults.get(key) != value and not key.startswith(left_out)]  # fmt: skip
    weights = experiment.model.weights
    return "; ".join([*changed, *([f"model.weights={Path(weights).name}"] if weights else [])])


def at_rate(row: str, lr: float) -> str:
    return f"{row}{'+' if ':' in row else ':'}training.lr={lr:g}"


def split_rate(label: str) -> tuple[str, str]:
    """Row and learning rate of a label that `at_rate` made; others have no rate."""
    row, found, lr = label.rpartition("training.lr=")
    return (row[:-1], lr) if found else (label, "")


def is_trained(row: str) -> bool:
    """Whether the method has rounds of training; the exact heads have none."""
    method = find("method", row.partition(":")[0])
    return method.name not in ("fed-ridge", "fed-logistic")


def tune(base: Experiment, rows: Sequence[str], out: Path, callback: ComparisonCallback) -> dict[str, str]:
    """Row → its label at the best rate."""
    scores: dict[str, dict[int, float]] = {}  # row → place in RATES → validation AUC
    todo = {row: range(start, start + 4) for row in rows if is_trained(row)
            for start in [RATES.index(FIRST_RATES["sgd" if SGD in row else "adamw"])]}  # fmt: skip
    while todo:
        labels = [at_rate(row, RATES[place]) for row, places in todo.items() for place in places]
        tried = compare(base, labels, [TUNE_SEED], out, metrics=[SELECTION], callback=callback)
        by_label = {row.label: row.values(SELECTION).get(TUNE_SEED, math.nan) for row in tried.rows}
        for row, places in todo.items():
            found = {place: by_label[at_rate(row, RATES[place])] for place in places}
            scores.setdefault(row, {}).update({p: -1.0 if math.isnan(v) else v for p, v in found.items()})
        todo = {row: [place] for row in todo for place in next_place(scores[row])}
    return {row: at_rate(row, RATES[best_place(scores[row])]) if row in scores else row for row in rows}


def best_place(scores: dict[int, float]) -> int:
    return max(sorted(scores), key=lambda place: scores[place])


def next_place(scores: dict[int, float]) -> list[int]:
    """The rate to try next; none if the best one lies between two others."""
    best = best_place(scores)
    if scores[best] < 0:
        return []  # every run failed
    return [place for place in (best - 1, best + 1) if place not in scores and 0 <= place < len(RATES)]


def make_table(name: str, root: Path, out: Path, only: Sequence[str]) -> str:
    table, callback = TABLES[name], ResultsFile(out / "results.csv", name)
    rows = [row for row in table.rows if not only or row == table.against or row.startswith(tuple(only))]
    base = Experiment.load(EXAMPLES / f"{table.example}.toml", {
        "data.root": str(root), "model.weights": str(root / "mobilenet_v2_imagenet.safetensors"), "engine.workers": 0,
        "model.stages": (17, 16, 13), "model.power": "sqrt", "model.flip_average": True,
        **table.settings,
    })  # fmt: skip
    labels = tune(base, rows, out / name, callback)
    for seed in SEEDS:  # the data of a seed is built once for all rows
        compare(base, list(labels.values()), [seed], out / name, callback=callback)
    against = labels[table.against]
    found = compare(base, list(labels.values()), SEEDS, out / name, metrics=METRICS, against=against, callback=callback)
    return write_table(found, name, out)


def write_table(found: Comparison, name: str, out: Path) -> str:
    tests = {(test.row, test.metric): test for test in found.tests}
    header = ["method", "rate", *METRICS, "Δ map", "Δ macro_auc", "MB up", "MB down", "CPU s"]
    seconds = {(line["row"], line["seed"]): float(line["cpu_seconds"]) for line in read_lines(out / "results.csv")
               if line["table"] == name}  # fmt: skip
    lines = []
    for row in found.rows:
        label, lr = split_rate(row.label)
        margins = []
        for metric in ("map", "macro_auc"):
            test = tests.get((row.label, metric))
            margins.append(f"{test.margin:+.1f} [{test.low:+.1f}, {test.high:+.1f}]" if test else "")
        costs = [f"{mean(cell.summary[f'bytes_{way}'] / 1e6 for cell in row.finished):.1f}" for way in ("up", "down")]
        used = f"{mean(seconds.get((label, str(cell.seed)), math.nan) for cell in row.finished):.0f}"
        lines.append([label, lr, *(cell_text(row, metric) for metric in METRICS), *margins, *costs, used])
    text = markdown_table(header, lines)
    (out / name / "fair-table.md").write_text(text + "\n")
    return text


def cell_text(row: ComparisonRow, metric: str) -> str:
    found = np.array(list(row.values(metric).values()))
    return f"{found.mean():.1f} ± {found.std(ddof=1):.1f}" if len(found) > 1 else "–"


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else math.nan


def read_lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "picture"])
    parser.add_argument("--root", type=Path, help="the folder with the packed data and the weights")
    parser.add_argument("--out", type=Path, default=Path("fair-tables"))
    parser.add_argument("--rows", default="", help="only rows whose names begin so, comma-separated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(make_table(options.table, options.root.absolute(), options.out, [*filter(None, options.rows.split(","))]))


if __name__ == "__main__":
    main()
