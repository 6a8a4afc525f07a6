"""`reproduce`: tables of papers, run at a tiny size, beside the published figures."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr, wilcoxon
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.comparison.reproduce import ReproducedValue, Reproduction, _average_values, reproduce
from fedmll.comparison.reproduction_record import read_reproduction
from fedmll.config.presets import PublishedValue, preset_names, read_published, read_table
from fedmll.core.errors import ConfigError, DataError
from fedmll.reports.html_report import write_report

TINY: dict[str, Any] = {
    "data.name": "ml-digits", "data.size": 8, "data.singles": 20, "data.pairs": 2, "model.backbone": "convnet",
    "model.weights": "random", "model.freeze": "none", "model.channels": [16], "training.rounds": 1,
    "training.augment": "none", "model.views": 1, "engine.workers": 0, "partition.clients": 4, "partition.holdout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reproduction, Path]:
    out = tmp_path_factory.mktemp("queries")
    return reproduce("fednca-ml/6", out, small=True, seeds=(0, 1), overrides=TINY | {"partition.presence": 1.0}), out


def test_every_published_figure_is_beside_the_value_of_its_run(queries: tuple[Reproduction, Path]) -> None:
    found, out = queries
    table = read_table("fednca-ml/6", small=True)
    published = {(figure.row, figure.metric): figure.value for figure in read_published()["fednca-ml/6", ""]}
    assert {(value.row, value.metric) for value in found.values} == published.keys()
    for value in found.values:
        folder = table.rows[value.row].replace(":", "-")
        metrics = [json.loads((out / folder / f"seed-{seed}/summary.json").read_text())["metrics"] for seed in (0, 1)]
        assert value.ours == {seed: metrics[seed][value.metric] for seed in (0, 1)}
        assert value.published is not None and value.published.value == published[value.row, value.metric]
        assert value.difference == pytest.approx(np.mean(list(value.ours.values())) - value.published.value)


def test_order_of_rows_and_rank_correlation(queries: tuple[Reproduction, Path]) -> None:
    found, _ = queries
    ((header, lines),) = (table for title, table in found.tables if title.startswith("order"))
    assert header[1:] == ["metric", "published order", "our order", "rank correlation"]
    assert [line[1] for line in lines] == ["macro_auc", "macro_f1", "micro_auc", "micro_f1"]
    assert lines[0][2] == "learnable-etf > fixed-etf > learnable-random"  # 85.39, 84.38, 82.94
    auc = [value for value in found.values if value.metric == "macro_auc"]
    assert lines[0][3] == " > ".join(value.row for value in sorted(auc, key=lambda value: -value.mean))
    rho = spearmanr([value.published.value for value in auc if value.published], [value.mean for value in auc])
    assert lines[0][4] == f"{rho.statistic:.2f}"


def test_settings_that_differ_from_the_full_table_are_listed(queries: tuple[Reproduction, Path]) -> None:
    changed = queries[0].changed_settings[""]
    assert changed["training.rounds"] == ("100", "1")
    assert changed["data.name"] == ("ml-medmnist:dermamnist", "ml-digits")
    assert changed["model.backbone"] == ("resnet18", "convnet")
    assert changed["model.weights"] == ("resnet18-imagenet1k-v1", "random")
    assert not [key for key in changed if key.startswith("engine")] and "partition.beta" not in changed


def test_files_of_a_reproduction(queries: tuple[Reproduction, Path]) -> None:
    found, out = queries
    markdown = (out / "reproduction.md").read_text()
    assert "| learnable-random | macro_auc | 82.94 |" in markdown and "training.rounds | 100 | 1" in markdown
    assert (out / "reproduction.tex").read_text().count(r"\begin{tabular}") == 3
    with (out / "reproduction.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(found.values)
    assert float(lines[0]["ours"]) - float(lines[0]["published"]) == pytest.approx(float(lines[0]["difference"]))
    record = read_reproduction(out)
    assert record is not None and record.groups == [""] and len(record.tables) == 3


def test_same_command_continues_and_runs_nothing_twice(queries: tuple[Reproduction, Path]) -> None:
    _, out = queries
    before = {file: file.stat().st_mtime_ns for file in out.rglob("summary.json")}
    assert len(before) == 6
    again = reproduce("fednca-ml/6", out, small=True, seeds=(0, 1), overrides=TINY | {"partition.presence": 1.0})
    assert {file: file.stat().st_mtime_ns for file in out.rglob("summary.json")} == before
    assert len(again.finished_runs) == 6


def test_report_shows_the_published_figures(queries: tuple[Reproduction, Path], tmp_path: Path) -> None:
    write_report([queries[1]], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Published figures" in page and "82.94" in page and "learnable-random" in page


def test_report_of_a_table_with_column_groups(tmp_path: Path) -> None:
    tiny = {key: value for key, value in TINY.items() if key != "partition.clients"} | {
        "data.singles": 40,
        "data.top_classes": 10,
    }
    found = reproduce("fedharmony/4", tmp_path, small=True, seeds=(0,), groups=["coco", "flair"], overrides=tiny)
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.is_dir()] == ["coco", "flair"]
    for value in found.values:
        assert value.row == "block against no-block" and value.published is not None
    metrics = [
        json.loads((tmp_path / "coco" / row / "seed-0/summary.json").read_text())["metrics"]
        for row in ("fedharmony", "fedharmony-blocks=false")
    ]
    table = read_table("fedharmony/4")
    pairs = [[of_row[name] for name in table.metrics] for of_row in metrics]
    if pairs[0] != pairs[1]:
        test = wilcoxon(*pairs)
        assert [value.ours for value in found.values if value.group == "coco"] == [
            {0: test.statistic}, {0: test.pvalue}
        ]  # fmt: skip
    write_report([tmp_path], tmp_path / "page.html")
    assert "fedharmony (coco)" in (tmp_path / "page.html").read_text()


def test_class_metrics_and_annotation_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedMLP, supplementary Figure 1: AP of each class beside the number of clients that annotate it."""
    table = replace(read_table("fedmlp/figure-S1", small=True), metrics=("ap/three", "ap/seven", "ap/none"))
    monkeypatch.setattr("fedmll.comparison.reproduce.read_table", lambda name, small: table)
    tiny = TINY | {"data.top_classes": 10, "training.rounds": 2}
    found = reproduce("fedmlp/figure-S1", tmp_path, small=True, seeds=(0,), overrides=tiny)
    (summary,) = (json.loads(file.read_text()) for file in tmp_path.rglob("summary.json"))
    with next(tmp_path.rglob("per_class.csv")).open(newline="") as stream:
        ap = {line["class"]: float(line["ap"]) for line in csv.DictReader(stream)}
    assert [value.ours for value in found.values] == [{0: ap["three"]}, {0: ap["seven"]}, {}]
    rates = ", ".join(f"{name} {count}" for name, count in summary["annotating_clients"].items())
    assert f"seed 0: of 4 clients annotate: {rates}." in found.notes


def figure(value: float) -> PublishedValue:
    return PublishedValue(row="fedavg", metric="bacc", value=value, std=None, note="")


def test_average_over_column_groups_needs_every_group() -> None:
    table = read_table("fedmlp/1")
    values = [
        ReproducedValue(group=group, row="fedavg", metric="bacc", published=figure(50), ours={0: ours, 1: ours + 1})
        for group, ours in zip(table.groups, (50.0, 60.0, 70.0, 80.0), strict=True)
    ]
    (average,) = _average_values(Reproduction(table=table, small=False, seeds=(0, 1), values=values))
    assert average.group == "average" and average.ours == {0: 65.0, 1: 66.0}
    assert average.published is not None and average.published.value == 62.34
    assert average.difference == pytest.approx(65.5 - 62.34)


def test_upper_bounds_and_added_rows_are_not_ranked() -> None:
    def value(row: str, published: float | None, ours: float, is_bound: bool = False) -> ReproducedValue:
        known = None if published is None else figure(published)
        return ReproducedValue(
            group="beta-0.5", row=row, metric="bacc", published=known, ours={0: ours}, is_bound=is_bound
        )

    values = [value("bound", 99, 99, True), value("a", 3, 1), value("b", 2, 2), value("added", None, 9)]
    found = Reproduction(table=read_table("fednca-ml/1"), small=False, seeds=(0,), values=values)
    ((_, lines),) = (table for title, table in found.tables if title.startswith("order"))
    assert lines == [["beta-0.5", "bacc", "a > b", "b > a", "-1.00"]]


def test_groups_without_data_are_skipped_and_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ich.*not found"):
        reproduce("fedmlp/3", tmp_path, overrides={"data.root": str(tmp_path)})


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no column group 'beta-1'.*did you mean 'beta-0.1'"):
        reproduce("fednca-ml/1", "nowhere", groups=["beta-1"])
    with pytest.raises(ConfigError, match=r"No row of fedlgt/A3 can be run.*no fine names.*without --small"):
        reproduce("fedlgt/A3", "nowhere", small=True)
    assert not Path("nowhere").exists()


def test_damaged_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "reproduction.json").write_text(
        '{"table": "fedlgt/1", "small": true, "seeds": [], "title": "x", "groups": ["../other"], "some_groups": false, '
        '"changed_settings": {}, "values": [], "tables": [], "notes": []}'
    )
    with pytest.raises(DataError, match=r"reproduction.json is damaged .*not the name of a folder"):
        read_reproduction(tmp_path)


def test_list_names_every_table_figure_and_need(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["reproduce", "--list", "--root", str(tmp_path)])
    assert found.exit_code == 0
    for name in preset_names():
        assert name in found.stdout
    assert "flair:coarse" in found.stdout and "Figure 4" in found.stdout and "the scan reads 719" in found.stdout


def test_command_without_a_table_says_what_to_type() -> None:
    found = CliRunner().invoke(app, ["reproduce"])
    assert isinstance(found.exception, ConfigError) and "fedmll reproduce fednca-ml/1 --small" in str(found.exception)
