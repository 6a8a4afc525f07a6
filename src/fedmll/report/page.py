"""The report: one HTML file that holds everything it shows and loads nothing.

Names of classes, methods and folders are somebody else's text: the template escapes all, and the data in the page is
JSON without a `<`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files as resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from PIL import Image

from fedmll import files
from fedmll.analysis.picture import Picture
from fedmll.report import drawn
from fedmll.report.by_class import by_class
from fedmll.report.by_client import by_client, label_maps
from fedmll.report.by_threshold import calibration, thresholds
from fedmll.report.chart import Chart
from fedmll.report.curves import curves
from fedmll.report.inside import inside
from fedmll.report.results import Results, results
from fedmll.report.runs import Run
from fedmll.report.study import Study, gather
from fedmll.report.words import common, counted, paragraph
from fedmll.running.folder import to_json

Look = Callable[[Run], list[Picture]]
SCREEN = 130  # dots an inch, of pictures in the page
COLOURS = 256  # of a picture in the page


@dataclass(frozen=True)
class Inside:
    """The pictures of one row: of its first seed."""

    label: str
    found: list[Picture]

    @property
    def pictures(self) -> list[dict[str, str]]:
        return [{"title": one.title, "words": one.words, "source": embedded(one)} for one in self.found]


def write_report(
    paths: Sequence[Path], out: Path, *, images: bool = False, keep_files: bool = False, look: Look | None = None
) -> Study:
    """The report of runs and comparisons, as `out`. `keep_files`: also every picture as PNG, SVG and CSV, in a folder
    beside it. `look` gives the pictures of a run's inside."""
    study = gather(paths)
    charts, table = charts_of(study), results(study)
    seen = [
        Inside(row.label, pictures)
        for row in study.rows
        if row.finished and (pictures := look(row.first) if look else inside(row.first, images))
    ]
    files.write(out, page(study, charts, table, seen))
    if keep_files:
        folder = files_beside(out)
        drawn.write(folder, (picture for chart in charts for picture in drawn.pictures(chart)))
        for one in seen:
            drawn.write(folder / drawn.safe(one.label), one.found)
        if table is not None:
            files.write(folder / "results.csv", drawn.as_csv(table.rows))
    return study


def files_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}-files")


def charts_of(study: Study) -> list[Chart]:
    """Those that the runs have something for."""
    found = [
        curves(study),
        by_class(study),
        label_maps(study),
        by_client(study),
        calibration(study),
        thresholds(study),
    ]
    return [chart for chart in found if chart is not None]


def page(study: Study, charts: Sequence[Chart], table: Results | None, seen: Sequence[Inside] = ()) -> str:
    shared, differ = common(study.rows)
    data = to_json({"charts": [chart.as_json for chart in charts]}).replace("<", "\\u003c")
    every = len(study.runs) + len(study.trials)
    return template("page.html.jinja").render(
        title=study.title,
        about=f"A report of {counted(every, 'run')}, by fedmll {version('fedmll')}.",
        paragraph=paragraph(study),
        labels=[row.label for row in study.rows],
        shared=shared,
        differ=differ if len(study.rows) > 1 else [],
        results=table,
        charts={chart.name: chart for chart in charts},
        inside=seen,
        lost=[*study.lost, *study.damaged],
        footer="Everything above is from the files in the runs' folders. This page loads nothing from elsewhere.",
        data=Markup(data),
        css=Markup(part_of("page.css")),
        script=Markup(part_of("page.js")),
    )


def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(part_of(name))


def part_of(name: str) -> str:
    return resources("fedmll.report").joinpath(name).read_text(encoding="utf-8")


def embedded(picture: Picture) -> str:
    """A picture as the address of itself: SVG, or a PNG of few colours, whichever is smaller."""
    lines = drawn.rendered(picture.figure, "svg")
    with Image.open(io.BytesIO(drawn.rendered(picture.figure, "png", SCREEN))) as full:
        small = io.BytesIO()
        few = full.convert("RGBA").quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(small, "PNG", optimize=True)  # what is transparent stays so: a page may be dark
    kind, content = min((("svg+xml", lines), ("png", small.getvalue())), key=lambda one: len(one[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
