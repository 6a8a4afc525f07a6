"""The HTML report: it is well-formed, loads nothing, escapes all text, and has the numbers of the runs' files."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from report_runs import comparison, write_predictions, write_run

from fedmll.data import federation
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.reports import chart_drawing, html_report, result_table
from fedmll.reports.figure import ReportFigure
from fedmll.reports.figures import image_sheets
from fedmll.reports.html_report import data_url, write_report
from fedmll.runs.run_folder import RunFolder

__all__ = ["comparison"]

EVIL = "</script><script>alert(1)</script>$x_<b>"
VOID = {"meta", "input", "img", "br"}


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files per chart, and a short bootstrap: both are slow."""
    monkeypatch.setattr(chart_drawing, "MAX_METRICS", 1)
    monkeypatch.setattr(image_sheets, "PER_CLASS", 1)
    monkeypatch.setattr(result_table, "bootstrap_intervals", partial(bootstrap_intervals, draws=2))


class Page(HTMLParser):
    """The tags, their order checked; the texts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        (found,) = (text for text in self.texts if text.startswith('{"charts"'))
        return {chart["name"]: chart for chart in json.loads(found)["charts"]}


WITH_IMAGES = ("The most confident mistakes", "Predicted and true labels")


def written(path: Path, *runs: Path, **options: Any) -> str:
    write_report(runs, path, **options)
    return path.read_text()


def test_report_of_a_moved_comparison_without_its_data(
    fedmll, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(comparison, tmp_path / "else" / "where")
    monkeypatch.setattr(federation, "build", None)  # no data, no model
    code, out, error = fedmll("report", "else/where")
    assert (code, error) == (0, "") and "written: report.html" in out
    page = Page((tmp_path / "report.html").read_text())
    assert set(page.data) == {"curves", "classes", "clients", "gain", "calibration", "thresholds"}
    cells = [tag for tag in page.tags if tag[0] == "td" and "data-value" in tag[1]]
    folder = tmp_path / "else" / "where" / "fedprox-mu=0.1"
    maps = [json.loads((folder / f"seed-{n}" / "summary.json").read_text())["metrics"]["map"] for n in (0, 1)]
    row = next(place for place, tag in enumerate(cells) if tag[1]["data-value"] == "fedprox:mu=0.1")
    assert float(cells[row + 2][1]["data-value"] or "") == pytest.approx(np.mean(maps))
    assert f"{np.mean(maps):.2f}" in page.texts and f"± {np.std(maps, ddof=1):.2f}" in page.texts
    last = page.data["curves"]["series"][1]["columns"]
    assert last["map"][-1] == pytest.approx(np.mean(maps), rel=1e-4) and last["round"] == [1, 2, 3]


def test_page_loads_nothing(comparison: Path, tmp_path: Path) -> None:
    html = written(tmp_path / "r.html", comparison)
    assert set(re.findall(r"https?://[^\s\"'<>)]*", html)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    for _, attributes in Page(html).tags:
        for name in ("src", "href", "action", "data", "style"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:image/"))
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in html and "url(" not in html.replace("url(#hatch)", "")
    assert not any(title in html for title in WITH_IMAGES), "no images without --images"
    assert "default-src 'none'" in html


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "<img src=x onerror=alert(2)>", metrics={"map": 1.0, EVIL: 2.0}, classes=(EVIL, "dog"),
        rounds=[{"round": 1, "map": 1.0, EVIL: 2.0}, {"round": 2, "map": 2.0, EVIL: 2.0}],
    )  # fmt: skip
    other = write_run(tmp_path / "b", metrics={"map": 1.0}, lr=0.5)
    (other / "experiment.toml").write_text((other / "experiment.toml").read_text().replace("pets", EVIL))
    write_predictions(folder, np.full((4, 2), 0.5), np.array([[0, 1], [1, 0]] * 2), (EVIL, "dog"))
    keep_clients = {"names": np.array([EVIL]), "classes": np.array([EVIL, "dog"]), "samples": np.array([4])}
    np.savez(
        folder / "client_labels.npz", **keep_clients, annotated=np.ones((1, 2), bool), positives=np.array([[2, 2]])
    )
    failed = write_run(tmp_path / "c", lr=0.7)
    (failed / "failed.json").write_text(json.dumps({"reason": EVIL}))
    html = written(tmp_path / "r.html", folder, other, failed, keep_files=True)
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert all(str(more["src"]).startswith("data:image/") for tag, more in page.tags if tag == "img")
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert page.data["clients"]["heatmaps"][0]["rows"] == [EVIL], "it is there, as text"
    assert any(EVIL in text for text in page.texts if not text.startswith('{"charts"'))


def test_files_that_cannot_be_read_are_named_and_the_rest_is_shown(fedmll, comparison: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "run"
    shutil.copytree(comparison / "fedprox-mu=0.1" / "seed-0", folder)
    for name in ("predictions.npz", "client_labels.npz"):
        (folder / name).write_bytes((folder / name).read_bytes()[:200])
    (folder / "per_class.csv").write_text("class,ap\ncat,high\n")
    (folder / "data_fingerprint.json").write_text("[]")
    code, _, error = fedmll("report", "run", "--out", "page.html")
    assert code == 0
    for name in ("predictions.npz", "client_labels.npz", "per_class.csv"):
        assert f"warning: run {name} cannot be read" in error
    page = Page((tmp_path / "page.html").read_text())
    assert set(page.data) == {"curves", "per-client"}
    assert any("predictions.npz cannot be read" in text for text in page.texts)


def test_no_results_is_a_one_line_error(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_run(tmp_path / "new")
    for words in (("report", "new"), ("report", "none"), ("plot", "new")):
        code, _, error = fedmll(*words)
        assert code == 2 and error.startswith("error: ") and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_an_unfinished_run_has_its_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", rounds=[{"round": n, "loss": 1.0 / n} for n in (1, 2)])
    page = Page(written(tmp_path / "r.html", run))
    assert page.data["curves"]["series"][0]["columns"]["loss"] == [1.0, 0.5]
    assert any("stopped: 2 of 3 rounds are done" in text for text in page.texts)
    assert not [tag for tag in page.tags if tag[0] == "table" and "results" in str(tag[1].get("class"))]


def example_figure(name: str, noisy: bool) -> ReportFigure:
    figure = Figure(figsize=(2, 2) if noisy else (9, 9))
    axes = figure.subplots()
    axes.set_axis_off()
    if noisy:
        axes.imshow(np.random.default_rng(0).random((200, 200)), interpolation="nearest")
    else:
        axes.plot([0, 1], [0, 1])
    rows = [{"x": 1, "y": 0.25}]
    return ReportFigure(name=name, title=f"Title of {name}", caption="What one sees.", figure=figure, rows=rows)


def test_figures_of_the_model_are_in_the_page_and_as_files(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [example_figure("plain", noisy=False), example_figure("noisy", noisy=True)]
    monkeypatch.setattr(html_report, "run_figures", lambda run, images: figures)
    html = written(tmp_path / "r.html", comparison / "fedprox-mu=0.1" / "seed-0", keep_files=True)
    page = Page(html)
    sources = [str(attributes["src"]) for tag, attributes in page.tags if tag == "img"]
    assert [source.partition(";")[0] for source in sources] == ["data:image/svg+xml", "data:image/png"], "the smaller"
    content = base64.b64decode(sources[1].partition(",")[2])
    assert Image.open(io.BytesIO(content)).width == 260
    assert "Inside the model" in page.texts and "Title of noisy" in page.texts
    kept = tmp_path / "r-files" / "fedprox"
    assert sorted(file.name for file in kept.iterdir()) == [
        f"{n}.{k}" for n in ("noisy", "plain") for k in ("csv", "png", "svg")
    ]
    assert (kept / "plain.csv").read_text() == "x,y\n1,0.25\n"


def test_the_same_figure_has_the_same_bytes() -> None:
    assert data_url(example_figure("a", noisy=False)) == data_url(example_figure("a", noisy=False))


def test_every_chart_is_written_as_files(comparison: Path, tmp_path: Path) -> None:
    html = written(tmp_path / "r.html", comparison, keep_files=True)
    folder = tmp_path / "r-files"
    names = {file.stem for file in folder.iterdir() if file.is_file()}
    assert {f"curves-macro_auc-{axis}" for axis in ("round", "megabytes", "seconds")} | {
        "classes-ap",
        "clients-seed-0",
    } <= names
    assert {"gain-map-method", "gain-map-samples", "calibration", "thresholds-macro_f1", "results"} <= names
    for name in names - {"results"}:
        assert Image.open(folder / f"{name}.png").width > 500
        assert (folder / f"{name}.svg").read_text().startswith("<?xml")
        assert len((folder / f"{name}.csv").read_text().splitlines()) > 1
    lines = (folder / "thresholds-macro_f1.csv").read_text().splitlines()
    shown = Page(html).data["thresholds"]["series"][0]["columns"]
    assert lines[0] == "series,threshold,macro_f1"
    assert float(lines[26].split(",")[2]) == pytest.approx(shown["macro_f1"][25], rel=1e-4)


def test_images_are_shown_on_request_if_the_data_is_unchanged(fedmll, comparison: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = comparison / "fedprox-mu=0.1" / "seed-0"
    code, _, error = fedmll("report", run, "--images", "--out", "with.html")
    assert (code, error) == (0, "")
    html = (tmp_path / "with.html").read_text()
    assert all(title in html for title in WITH_IMAGES)
    shutil.copytree(run, tmp_path / "gone")
    toml = (tmp_path / "gone" / "experiment.toml").read_text()
    (tmp_path / "gone" / "experiment.toml").write_text(toml.replace("limit = 240", "limit = 200"))
    RunFolder("gone").write_summary(RunFolder("gone").read_summary())
    code, _, error = fedmll("report", "gone", "--images", "--out", "without.html")
    assert code == 0 and "images of the data are not shown: The data differs from what the run" in error
    assert not any(title in (tmp_path / "without.html").read_text() for title in WITH_IMAGES)


def test_ten_methods_and_three_seeds_are_under_5_mb(tmp_path: Path) -> None:
    draw, classes = np.random.default_rng(0), tuple(f"class {n}" for n in range(20))
    names = [f"metric_{n}" for n in range(30)]
    for method in range(10):
        for seed in range(3):
            rounds = [{"round": n, **dict(zip(names, 100 * draw.random(30), strict=True))} for n in range(1, 101)]
            folder = tmp_path / "grid" / f"method-{method}" / f"seed-{seed}"
            write_run(folder, method=f"method-{method}", seed=seed, metrics=rounds[-1], rounds=rounds, classes=classes)
            write_predictions(folder, draw.random((200, 20)), draw.integers(0, 2, (200, 20)), classes)
    html = written(tmp_path / "r.html", tmp_path / "grid")
    assert len(html.encode()) < 5e6
    assert len(Page(html).data["curves"]["series"]) == 10
