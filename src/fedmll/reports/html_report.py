"""The HTML report of runs and comparisons: one file that contains everything it shows and loads nothing.

Names of classes, methods and folders may come from others, so the template escapes all of them, and the data in the
page is JSON without a `<`.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files as resources
from pathlib import Path, PurePath
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from PIL import Image

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns, read_compared_runs
from fedmll.comparison.tables import UPPER_BOUND, is_ranked
from fedmll.core import files
from fedmll.core.errors import FedmllError
from fedmll.core.versions import fedmll_version
from fedmll.data.dataset import Dataset
from fedmll.evaluation.metric_definitions import BEST_METHOD_BY, METRICS, label_of
from fedmll.inference.load_run import SavedRun, load_run
from fedmll.reports.chart_drawing import chart_figures
from fedmll.reports.charts import Chart, calibration_chart, class_chart, client_chart, label_heatmaps, threshold_chart
from fedmll.reports.curves import learning_curves
from fedmll.reports.figure import ReportFigure, file_name, render, write_figures
from fedmll.reports.figures import (
    attention,
    class_features,
    image_sheets,
    label_correlation,
    label_coverage,
    pseudo_labels,
)
from fedmll.reports.result_table import ResultTable, rankable, result_table
from fedmll.runs.formatting import by_site_table, dicts_to_csv, mean_and_std, to_json
from fedmll.runs.run_folder import RunState
from fedmll.runs.run_overview import RunRecord

SCREEN_RESOLUTION = 130  # dots per inch of figures in the page
PALETTE_SIZE = 256  # colours of a figure in the page


def write_report(paths: Sequence[Path], out: Path, *, images: bool = False, keep_files: bool = False) -> ComparedRuns:
    """Write the report of runs and comparisons.

    Args:
        paths: Folders of runs and comparisons.
        out: The HTML file.
        images: Also show images of the data; needs the data.
        keep_files: Also write every figure as PNG, SVG and CSV, into a folder next to the page.

    Returns:
        What was read, with the reasons for what is missing.
    """
    compared = read_compared_runs(paths)
    charts, table = make_charts(compared), result_table(compared)
    first_seeds = [(row.label, row.first) for row in compared.rows if row.finished]
    figures = [(label, run_figures(run, images)) for label, run in first_seeds]
    files.write_atomic(out, render_page(compared, charts, table, figures))
    if keep_files:
        folder = figure_folder(out)
        write_figures(folder, (figure for chart in charts for figure in chart_figures(chart)))
        for label, of_row in figures:
            write_figures(folder / file_name(label), of_row)
        if table is not None:
            files.write_atomic(folder / "results.csv", dicts_to_csv(table.csv_rows))
    return compared


def figure_folder(out: Path) -> Path:
    """The folder for the figures of a page."""
    return out.with_name(f"{out.stem}-files")


def make_charts(compared: ComparedRuns) -> list[Chart]:
    """The charts for which the runs have data."""
    charts = [
        learning_curves(compared),
        class_chart(compared),
        label_heatmaps(compared),
        client_chart(compared),
        calibration_chart(compared),
        threshold_chart(compared),
    ]
    return [chart for chart in charts if chart is not None]


def render_page(
    compared: ComparedRuns,
    charts: Sequence[Chart],
    table: ResultTable | None,
    figures: Sequence[tuple[str, list[ReportFigure]]],
) -> str:
    shared, differing = compare_settings(compared.rows)
    runs = len(compared.runs) + len(compared.trials)
    return load_template("page.html.jinja").render(
        title=compared.title,
        about=f"Report of {count_of(runs, 'run')}, written by fedmll {fedmll_version()}.",
        description=describe_runs(compared),
        labels=[row.label for row in compared.rows],
        shared=shared,
        differing=differing if len(compared.rows) > 1 else [],
        table=table,
        by_site=[
            (row.label, *by_site_table(row.first.summary))
            for row in compared.rows
            if row.finished and row.first.summary.get("by_site")
        ],
        reproductions=compared.reproductions,
        charts={chart.name: chart for chart in charts},
        model_figures=[(label, [(one, data_url(one)) for one in of_row]) for label, of_row in figures if of_row],
        missing=[*compared.missing, *compared.damaged],
        footer="All numbers come from the files in the folders of the runs. This page loads nothing from the network.",
        data=chart_data(charts),
        css=Markup(read_resource("page.css")),
        script=Markup(read_resource("page.js")),
    )


def chart_data(charts: Sequence[Chart]) -> Markup:
    """The numbers of the charts as JSON for `page.js`, safe inside a script element."""
    return Markup(to_json({"charts": [chart.as_json for chart in charts]}).replace("<", "\\u003c"))


def load_template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(read_resource(name))


def read_resource(name: str) -> str:
    return resources("fedmll.reports").joinpath(name).read_text(encoding="utf-8")


def data_url(figure: ReportFigure) -> str:
    """The figure inside the page: as SVG, or as PNG with few colours, whichever is smaller."""
    svg = render(figure.figure, "svg")
    with Image.open(io.BytesIO(render(figure.figure, "png", SCREEN_RESOLUTION))) as full:
        png = io.BytesIO()
        small = full.convert("RGBA").quantize(PALETTE_SIZE, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        small.save(png, "PNG", optimize=True)  # it stays transparent: the page may be dark
    kind, content = min((("svg+xml", svg), ("png", png.getvalue())), key=lambda one: len(one[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


# ---- Figures of the model of one run


def model_figures(run: SavedRun, data: Dataset | None = None) -> list[ReportFigure]:
    """All figures that a finished run has the numbers for. With its test data (`run.load_test_data()`) there are also
    figures that need the images, and some of these show images."""
    figures = [
        label_correlation.correlation_figure(run),
        class_features.class_vector_figure(run),
        *pseudo_labels.pseudo_label_figures(run),
        label_coverage.coverage_figure(run),
        *(() if data is None else _figures_with_data(run, data)),
    ]
    return [figure for figure in figures if figure is not None]


def _figures_with_data(run: SavedRun, data: Dataset) -> Iterator[ReportFigure | None]:
    run.check_test_data(data)
    features = class_features.compute_class_features(run, data)
    if features is not None:
        yield class_features.class_feature_figure(run, features)
        yield class_features.tsne_figure(run, features)
    yield attention.attention_figure(run, data)
    yield image_sheets.example_figure(run, data)


def run_figures(run: RunRecord, images: bool) -> list[ReportFigure]:
    """The figures of a finished run, for the report. The reason for a missing figure is added to `run.damaged`.
    Plug-ins that the folder names are not executed, so a run that needs one has no figures of its model."""
    path = run.folder.path
    try:
        saved = load_run(path, plugins=())
        data = saved.load_test_data() if images else None
    except FedmllError as error:
        run.damaged.append(f"images of the data are not shown: {error}")
        saved, data = load_run(path, plugins=()), None
    figures: list[ReportFigure] = []
    try:
        figures += model_figures(saved, data)
        if data is not None and len(data.sample_shape) == 3:
            figures.append(image_sheets.mistake_figure(saved))
    except FedmllError as error:
        run.damaged.append(f"figures of the model are missing: {error}")
    return figures


# ---- What was run and what came out, in one paragraph

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTITIONS = {
    "dirichlet": "divided among {clients}, each class by a Dirichlet distribution (β = {beta:g})",
    "natural": "divided among {clients} by the sites that it comes from",
    "labels-per-client": "divided among {clients} with {labels_per_client} classes each",
    "iid": "divided among {clients} at random",
    "sites": "held by {clients} of sites with different data and label sets",
}
PARTS = (("train", "training"), ("validation", "validation"), ("test", "test"))
NO_DATA = "none"  # data.name at the server of a federation between machines
NO_BREAK = "\N{NO-BREAK SPACE}"
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
NO_SETTINGS = ("seed", "engine", "plugins")  # parts of an experiment that do not change what is compared
PATHS = ("data.root", "model.weights")  # only the file name is shown

Settings = list[tuple[str, str]]


def describe_runs(compared: ComparedRuns) -> str:
    """One paragraph. It says nothing that is not in the files of the runs."""
    sentences = [
        _what_was_run(compared),
        _data(compared),
        _training(compared),
        _best_method(compared),
        _unfinished_runs(compared),
    ]
    text = " ".join(sentence for sentence in sentences if sentence)
    return text.replace(" ± ", f"{NO_BREAK}±{NO_BREAK}").replace(" %", f"{NO_BREAK}%")


def count_of(number: int, thing: str) -> str:
    """`two classes`, `1,200 clients`"""
    word = NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"
    return f"{word} {thing}" + ("" if number == 1 else "es" if thing.endswith("ss") else "s")


def _what_was_run(compared: ComparedRuns) -> str:
    seeds = sorted({run.seed for run in compared.runs})
    with_seeds = f"with seed {seeds[0]}" if len(seeds) == 1 else f"with seeds {_list(seeds)}"
    if len(compared.rows) == 1:
        return f"The method {compared.rows[0].label} was run on {_data_names(compared)} {with_seeds}."
    return (
        f"{count_of(len(compared.rows), 'method').capitalize()} were compared on {_data_names(compared)} {with_seeds}."
    )


def _data_names(compared: ComparedRuns) -> str:
    names = {run.data_name for run in compared.runs if run.experiment}
    names = {"the data of the sites" if name == NO_DATA else name for name in names}
    return _list(sorted(names)) or "unknown data"


def _data(compared: ComparedRuns) -> str:
    """The data of the first finished run; in a comparison all runs have the same."""
    run = next(iter(compared.finished), None)
    if run is None:
        return ""
    try:
        samples = run.summary["samples"]
        sizes = [f"{samples[name]:,} {word}" for name, word in PARTS if samples.get(name)]
        text = f"The data has {count_of(len(run.summary['classes']), 'class')}"
        text += f" and {_list(sizes)} samples" if sizes else ""
        return f"{text}. {_partition(run)}"
    except (KeyError, TypeError, ValueError):
        return ""


def _partition(run: RunRecord) -> str:
    if run.data_name == NO_DATA:
        return f"It is held by {count_of(int(run.summary['clients']), 'site')}."
    setting = run.experiment.get("partition", {})
    clients = count_of(int(run.summary["clients"]), "client")
    how = PARTITIONS.get(str(setting.get("kind", "")), "divided among {clients} by the partition “{kind}”")
    text = f"It is {how.format(**{'beta': 0, 'labels_per_client': 0, 'kind': '?'} | setting | {'clients': clients})}"
    annotation = run.experiment.get("annotation", {})
    if annotation.get("kind", "none") != "none":
        missing = annotation.get("missing")
        text += (
            f"; each client leaves {missing} of the classes unlabelled"
            if missing
            else f"; not every client annotates every class (annotation “{annotation['kind']}”)"
        )
    return text + "."


def _training(compared: ComparedRuns) -> str:
    """The training settings that all rows share."""
    shared = dict(compare_settings(compared.rows)[0])
    parts = []
    if "training.rounds" in shared:
        parts.append(count_of(int(shared["training.rounds"]), "round"))
    if "training.local_epochs" in shared:
        parts.append(f"{count_of(int(shared['training.local_epochs']), 'local epoch')} per round")
    optimizer, lr = shared.get("training.optimizer"), shared.get("training.lr")
    if optimizer:
        optimizer = OPTIMIZERS.get(optimizer, optimizer)
        rate = f"learning rate {lr}" if lr else "a learning rate that differs between the rows"
        parts.append(f"{optimizer} with {rate}")
    backbone = shared.get("model.backbone")
    if backbone:
        frozen = " (frozen)" if shared.get("model.freeze") == "backbone" else ""
        parts.append(f"backbone {backbone}{frozen}")
    text = f"Training: {', '.join(parts)}." if parts else ""
    if compared.trials:
        text += (
            f" {count_of(len(compared.trials), 'further run').capitalize()} chose the settings on the validation data."
        )
    return text


def _best_method(compared: ComparedRuns) -> str:
    """The row with the highest mean of the first metric that there is, among the rows that compete."""
    for metric in BEST_METHOD_BY:
        found = [(row, row.values(metric)) for row in compared.rows]
        ranked = [pair for pair, is_one in zip(found, is_ranked(rankable(compared)), strict=True) if is_one]
        found = [(row, values) for row, values in found if len(values)]
        if not found:
            continue
        best, values = max([pair for pair in ranked if len(pair[1])] or found, key=lambda pair: float(pair[1].mean()))
        value = f"{mean_and_std(np.asarray(values))} %"
        where = " on the test data" if metric in METRICS else ""
        if len(found) == 1:
            return f"The {label_of(metric)}{where} is {value}." if where else f"{label_of(metric)}: {value}."
        text = f"{best.label} has the highest {label_of(metric)}{where}: {value}"
        bound = [of_row for row, of_row in found if row.first.method == UPPER_BOUND]
        central = f" (centralized training: {mean_and_std(np.asarray(bound[0]))} %)" if bound else ""
        return f"{text}{central}."
    return "No run is finished yet; the numbers are those of the rounds so far."


def _unfinished_runs(compared: ComparedRuns) -> str:
    states = Counter(run.state for run in [*compared.runs, *compared.trials] if not run.is_finished)
    states[RunState.FAILED] += len(compared.rejected)
    parts = [
        f"{count_of(count, 'run')} " + ("failed" if state is RunState.FAILED else f"{_is(count)} {state}")
        for state, count in states.items()
        if count
    ]
    text = _list(parts)
    return f"{text[0].upper()}{text[1:]} (see below)." if text else ""


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _list(items: Sequence[Any]) -> str:
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def compare_settings(rows: Sequence[ComparedRow]) -> tuple[Settings, list[tuple[str, list[str]]]]:
    """The settings that all rows share, and those that differ, with the value of each row."""
    flat = [_flatten(row.first.experiment) for row in rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    shared = [(key, flat[0][key]) for key in keys if all(one.get(key) == flat[0].get(key) for one in flat)]
    differing = [(key, [one.get(key, "–") for one in flat]) for key in keys if key not in dict(shared)]
    return shared, differing


def _flatten(experiment: dict[str, Any]) -> dict[str, str]:
    settings = {}
    for section, values in experiment.items():
        if section not in NO_SETTINGS and isinstance(values, dict):
            for key, value in values.items():
                name = f"{section}.{key}"
                settings[name] = PurePath(str(value)).name if name in PATHS else _text(value)
    return settings


def _text(value: Any) -> str:
    if isinstance(value, str):
        kind, colon, path = value.rpartition(":")  # `packed:/data/FILE.npz` becomes `packed:FILE.npz`
        return f"{kind}{colon}{PurePath(path).name}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
