"""Tests of margins: the whole path of a comparison's predictions against a plain loop; LaTeX that compiles."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmll.comparison.plan import Variant
from fedmll.comparison.results import Comparison, ComparisonCell, ComparisonRow
from fedmll.comparison.statistics import MarginTest, compute_margin_tests, notes_on_tests, table_of_tests
from fedmll.comparison.tables import TABLE_FILES, RankableRow, escape_latex, latex_tables, rank_values, write_tables
from fedmll.evaluation.bootstrap import draw_counts
from fedmll.evaluation.metrics import evaluate
from fedmll.evaluation.significance import wilcoxon
from fedmll.evaluation.thresholds import best_thresholds

SAMPLES, CLASSES = 40, 3


def made(folder: Path, label: str, seeds: Sequence[int], better: float, patients: bool = False) -> ComparisonRow:
    """A row of runs that were not trained: kept predictions, and the metrics of them."""
    cells = []
    for seed in seeds:
        generator = np.random.default_rng(seed)  # the same test samples for every row
        rows = np.sort(generator.choice(60, SAMPLES, replace=False))
        targets = generator.integers(0, 2, (SAMPLES, CLASSES)).astype(np.int8)
        noise = np.random.default_rng([seed, *label.encode()]).random((SAMPLES, CLASSES))
        scores = ((targets * better + noise) / (1 + better)).astype(np.float32)
        out = folder / label / f"seed-{seed}"
        out.mkdir(parents=True)
        arrays: dict[str, Any] = {"classes": np.array(["a", "b", "c"])}
        for part in ("test", "validation"):
            arrays |= {f"{part}_probabilities": scores, f"{part}_targets": targets, f"{part}_rows": rows}
        if patients:
            arrays["test_patients"] = np.array([f"p{row // 3}" for row in rows])
        np.savez(out / "predictions.npz", **arrays)
        metrics = evaluate(scores, targets, "abc", best_thresholds(scores, targets)).values
        summary = {"metrics": metrics, "rounds": 1, "seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
        cells.append(
            ComparisonCell(
                variant=Variant(label, {}), seed=seed, setting={}, path=out, experiment=small(), summary=summary
            )
        )
    return ComparisonRow(label=label, cells=cells)


def compared(rows: list[ComparisonRow], seeds: Sequence[int], **rest: Any) -> Comparison:
    return Comparison(
        rows=rows, seeds=list(seeds), metrics=("macro_auc", "macro_f1_tuned"), against=rows[0].label, **rest
    )


@pytest.mark.parametrize("patients", [False, True])
def test_interval_of_a_margin_equals_a_plain_loop(tmp_path: Path, patients: bool) -> None:
    """Test samples differ from seed to seed and overlap: one that is drawn is drawn wherever it is."""
    seeds = (3, 4)
    base, other = (made(tmp_path, label, seeds, b, patients) for label, b in (("base", 0.1), ("other", 0.4)))
    found = compute_margin_tests(compared([base, other], seeds), "base", ["macro_auc", "macro_f1_tuned"], draws=50)
    assert [(test.row, test.metric, test.seeds) for test in found] == [
        ("other", "macro_auc", 2), ("other", "macro_f1_tuned", 2)
    ]  # fmt: skip
    cells = [*base.cells, *other.cells]
    kept = {(cell.variant.label, cell.seed): dict(np.load(cell.path / "predictions.npz")) for cell in cells}
    name = "test_patients" if patients else "test_rows"
    units = sorted({unit for arrays in kept.values() for unit in arrays[name].tolist()})
    assert len(units) > SAMPLES or patients
    margins: dict[str, list[float]] = {"macro_auc": [], "macro_f1_tuned": []}
    for counts in np.concatenate([part.T for part in draw_counts(len(units), 0, 50)]):
        times = dict(zip(units, counts.astype(int), strict=True))
        drawn: dict[tuple[str, int], dict[str, float]] = {}
        for key, arrays in kept.items():
            rows = [n for n, unit in enumerate(arrays[name].tolist()) for _ in range(times[unit])]
            scores, targets = arrays["test_probabilities"], arrays["test_targets"]
            drawn[key] = evaluate(scores[rows], targets[rows], "abc", best_thresholds(scores, targets)).values
        for metric, values in margins.items():
            values.append(float(np.mean([drawn["other", s][metric] - drawn["base", s][metric] for s in seeds])))
    for test in found:
        assert (test.low, test.high) == pytest.approx(tuple(np.percentile(margins[test.metric], [2.5, 97.5])))
        ours, theirs = other.values(test.metric), base.values(test.metric)
        assert test.margin == pytest.approx(np.mean([ours[s] - theirs[s] for s in seeds]))
        assert test.p == wilcoxon([ours[s] - theirs[s] for s in seeds]) == test.adjusted
        assert test.drawn == ("patients" if patients else "samples")


def test_holm_correction_is_over_the_rows_of_a_metric(tmp_path: Path) -> None:
    seeds = range(5)
    rows = [made(tmp_path, label, seeds, b) for label, b in (("base", 0.1), ("much", 2.0), ("evenly", 0.11))]
    found = compute_margin_tests(compared(rows, seeds), "base", ["macro_auc"], draws=2)
    much, evenly = found
    assert much.p == 2 / 2**5 and much.adjusted == pytest.approx(min(1, 2 * much.p))
    assert evenly.adjusted == pytest.approx(max(evenly.p, much.adjusted))
    notes = notes_on_tests(found)
    assert "over 5 seeds" in notes[0] and "for the 2 rows" in notes[0]
    assert notes[1].startswith(
        "5 seeds are too few to reach p < 0.05: the lowest p that they can give is 0.0625, and 0.125"
    )
    assert notes[1].endswith("7 seeds can.") and "1000 bootstrap draws of the test samples" in notes[2]


def test_seven_seeds_are_enough_for_two_rows() -> None:
    enough = [MarginTest(row=row, metric="map", seeds=7, margin=1.0, p=2 / 2**7, adjusted=4 / 2**7) for row in "ab"]
    assert len(notes_on_tests(enough)) == 1
    assert (
        "3 seeds are too few"
        in notes_on_tests(
            [MarginTest(row="a", metric="map", seeds=3, margin=1.0, low=0.5, high=1.5, p=0.25, adjusted=0.25)]
        )[1]
    )
    assert notes_on_tests([]) == []
    header, ((*figures,),) = table_of_tests("base", enough[:1])
    assert header[0] == "margin over base" and figures == ["a", "map", "+1.00", "–", "0.0156", "0.0312", "7"]


def test_no_interval_without_predictions_or_on_different_samples(tmp_path: Path) -> None:
    base, gone, other = (made(tmp_path, label, [0, 1], 0.3) for label in ("base", "gone", "other"))
    (gone.cells[1].path / "predictions.npz").unlink()
    file = other.cells[0].path / "predictions.npz"
    arrays = dict(np.load(file))
    np.savez(file, **(arrays | {"test_targets": 1 - arrays["test_targets"]}))
    found = compute_margin_tests(compared([base, gone, other], [0, 1]), "base", ["macro_auc", "val_map"], draws=3)
    assert all(math.isnan(test.low) for test in found)
    assert (
        all(0 < test.p <= 1 for test in found[:2]) and "no stored predictions" in found[0].missing
    )  # seeds are enough
    assert found[1].missing == "other and base were tested on different samples."
    assert found[2].seeds == 0 and math.isnan(found[2].adjusted)  # nobody has val_map here
    notes = notes_on_tests(found)
    assert [note for note in notes if note.startswith("no interval for other: other and base")]


# ---- LaTeX ----------------------------------------------------------------------------------------------------------


def balanced(text: str) -> bool:
    bare = re.sub(r"\\[\\{}$&%#_]", "", text)
    return (
        bare.count("{") == bare.count("}")
        and bare.count("$") % 2 == 0
        and text.count(r"\begin{tabular}") == text.count(r"\end{tabular}")
    )


def test_latex_special_characters_are_escaped() -> None:
    assert escape_latex("macro_f1 95% a&b #1 $x {y} ~^") == (
        r"macro\_f1 95\% a\&b \#1 \$x \{y\} \textasciitilde{}\textasciicircum{}"
    )
    assert escape_latex("34.10 ± 0.20 – … λ ≥ [4, 8] \\") == (
        r"34.10 $\pm$ 0.20 -- \ldots{} $\lambda$ $\geq$ {[}4, 8{]} \textbackslash{}"
    )
    assert escape_latex("a\n\nb") == "a b" and escape_latex("漢字") == "??" and escape_latex("Zürich") == "Zürich"


def test_latex_best_is_bold_and_second_underlined(tmp_path: Path) -> None:
    def row(label: str, auc: list[float], hamming: list[float]) -> ComparisonRow:
        cells = [
            ComparisonCell(variant=Variant(label, {}), seed=seed, setting={}, path=tmp_path, experiment=small(),
                           summary={
                "metrics": {"macro_auc": a, "hamming": h}, "rounds": 1, "seconds": 1.0, "bytes_up": 0, "bytes_down": 0
            })
            for seed, (a, h) in enumerate(zip(auc, hamming, strict=True))
        ]  # fmt: skip
        return ComparisonRow(label=label, cells=cells)

    rows = [
        row("a_b:x=50%", [80, 80], [9, 9]), row("c", [79.999, 80.001], [7, 7]), row("d", [70, 70], [8, 8]),
        row("short", [99], [1]),
    ]  # fmt: skip
    found = Comparison(rows=rows, seeds=[0, 1], metrics=("macro_auc", "hamming"))
    text = latex_tables(found, found.tables)
    lines = {line.split(" & ")[0]: line for line in text.splitlines() if " & " in line}
    assert r"a\_b:x=50\%" in lines and r"macro\_auc" in lines["method"]
    assert r"\textbf{80.00 $\pm$ 0.00} & 9.00" in lines[r"a\_b:x=50\%"]  # equal as printed: both are best
    assert r"\textbf{80.00 $\pm$ 0.00} & \textbf{7.00" in lines["c"]  # of hamming the lowest
    assert r"\underline{70.00 $\pm$ 0.00} & \underline{8.00" in lines["d"]
    assert "textbf" not in lines["short"]  # it has not all seeds
    assert balanced(text) and all(line.endswith(r"\\") for line in lines.values())
    assert len({line.count(" & ") for line in lines.values()}) == 1
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_rank_values() -> None:
    def ranks(metric: str, *means: float, seeds: Sequence[int] = (3, 3, 3, 3)) -> list[str]:
        methods = ("fedavg", "fedprox", "centralized", "fedavg-pl")
        rows = [RankableRow(method, count) for method, count in zip(methods, seeds, strict=True)]
        return rank_values(metric, rows, means)

    assert ranks("map", 1.0, 3.0, 9.0, 3.001) == ["second", "best", "", "best"]
    assert ranks("hamming", 1.0, 3.0, 0.5, math.nan) == ["best", "second", "", ""]
    assert ranks("map", 1.0, 3.0, 9.0, 2.0, seeds=(3, 2, 3, 3)) == ["second", "", "", "best"]
    assert ranks("map", 1.0, 1.0, 9.0, 1.0) == ranks("s/round", 1.0, 2.0, 3.0, 4.0) == [""] * 4


def test_all_tables_are_written_and_outdated_ones_removed(tmp_path: Path) -> None:
    rows = [made(tmp_path, label, [0, 1], 0.3) for label in ("base", "other")]
    found = compared(rows, [0, 1])
    found = compared(rows, [0, 1], tests=compute_margin_tests(found, "base", ["macro_auc"], draws=4))
    write_tables(found, tmp_path)
    assert {name for name in TABLE_FILES if (tmp_path / name).is_file()} == set(TABLE_FILES) - {"tuning.md"}
    assert balanced((tmp_path / "table.tex").read_text()) and r"95\% interval" in (tmp_path / "table.tex").read_text()
    with (tmp_path / "tests.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["margin"]) == found.tests[0].margin and float(line["low"]) == found.tests[0].low
    assert "| margin over base | metric | margin |" in (tmp_path / "table.md").read_text()
    write_tables(compared(rows, [0, 1]), tmp_path)
    assert not (tmp_path / "tests.csv").exists()


def test_metric_of_a_plugin_has_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedmll.core import registry

    def mean_score(scores: np.ndarray, targets: np.ndarray) -> float:
        return float(scores.mean())

    monkeypatch.setattr(registry, "find_added", lambda kind: {"mean_score": mean_score})
    rows = [made(tmp_path, label, [0], 0.3) for label in ("base", "other")]
    for row in rows:
        row.cells[0].summary = {"metrics": {"mean_score": 0.5}, "rounds": 1}
    (test,) = compute_margin_tests(compared(rows, [0]), "base", ["mean_score"], draws=5)
    assert test.margin == 0 and test.low < test.high
