"""The commands for trained models: predict, export, errors, tune."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmll.cli.options import Plugins
from fedmll.cli.output import console, print_table, say, warn, warnings_of
from fedmll.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedmll.evaluation.metrics import Confusion
    from fedmll.inference.image_predictions import ImagePrediction
    from fedmll.inference.load_run import SavedRun
    from fedmll.inference.model_file import SavedModel

MAX_ROWS = 20  # in the terminal; a file has all rows
TUNED = "tuned"

RunOrModel = Annotated[
    Path, typer.Argument(metavar="RUN_OR_MODEL", help="The folder of a run, or a model.safetensors file.")
]


def register(app: typer.Typer) -> None:
    app.command()(predict)
    app.command()(export)
    app.command("errors")(show_errors)
    app.command()(tune)


def predict(
    model: RunOrModel,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES…", help="Image files, or folders of them; tables for a model of a table."),
    ],
    known: Annotated[
        list[str] | None,
        typer.Option(metavar="class=1", help="A label that is known for all images, 1 or 0; repeatable."),
    ] = None,
    threshold: Annotated[
        str, typer.Option(help="Predict classes with a probability above this; `tuned`: one threshold per class.")
    ] = "0.5",
    top: Annotated[int | None, typer.Option(min=1, help="Instead of a threshold: the K most probable classes.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all probabilities to FILE.csv, .json or .parquet.")] = None,
    plugins: Plugins = None,
) -> None:
    """Predict the labels of images with a trained model; print a table and write a file with --out.

    Examples:  [bold]fedmll predict runs/first scan.png[/]  ·  [bold]fedmll predict runs/first IMAGES --out p.csv[/]
    """
    from fedmll.inference.image_predictions import display_path, find_images, open_prediction_writer

    _, used = load_model_of(model, plugins)
    known_labels = parse_known(known)
    thresholds = parse_thresholds(threshold, used)
    paths, others = find_images(images)
    rows: list[tuple[str, ...]] = []
    unreadable: list[str] = []
    count = 0
    with ExitStack() as stack:
        write = None if out is None else stack.enter_context(open_prediction_writer(out, used.classes))
        advance = stack.enter_context(progress_over(len(paths)))
        for prediction in used.stream(paths, known_labels or None):
            count += 1
            chosen = predicted_classes(prediction, thresholds, top)
            if prediction.probabilities is None:
                unreadable.append(f"{display_path(prediction.path)} ({prediction.reason})")
            elif len(rows) < MAX_ROWS:
                rows.append((display_path(prediction.path), format_prediction(prediction, chosen, used)))
            if write is not None:
                write(prediction, [used.classes[label] for label in chosen])
            advance()
        if len(unreadable) == count:
            raise DataError(unreadable_text(unreadable, count))
    print_predictions(rows, count - len(unreadable), out)
    if unreadable:
        warn(unreadable_text(unreadable, count))
    if others:
        endings = sorted({display_path(Path(path.suffix)) if path.suffix else "no ending" for path in others})
        warn(f"{len(others)} other files of the folders were left out ({', '.join(endings[:5])}).")


def load_model_of(path: Path, plugins: list[Path] | None) -> tuple[SavedRun | SavedModel, SavedModel]:
    """The run or model at a path, and its model. A warning names plug-ins that differ from the model's."""
    from fedmll.inference.load_run import SavedRun, load_run_or_model
    from fedmll.inference.model_metadata import PluginWarning

    with warnings_of(PluginWarning):
        found = load_run_or_model(path, plugins=plugins)
        return found, found.model if isinstance(found, SavedRun) else found


def print_predictions(rows: list[tuple[str, ...]], count: int, out: Path | None) -> None:
    print_table("predictions", ("image", "classes"), rows, words=True)
    more = count - len(rows)
    if more:
        say(f"and {more} more" + ("" if out is not None else "; --out FILE.csv writes all"))
    if out is not None:
        say(f"all probabilities written to {out}")


def unreadable_text(unreadable: list[str], count: int) -> str:
    from fedmll.data.images.problems import abbreviate

    return f"{len(unreadable)} of {count} images cannot be read: {abbreviate(unreadable)}."


def parse_known(known: list[str] | None) -> dict[str, int]:
    found = {}
    for text in known or ():
        name, equals, value = text.rpartition("=")
        if not equals or value not in ("0", "1"):
            raise ConfigError(f"--known takes class=1 or class=0; it got '{text}'.")
        found[name] = int(value)
    return found


def parse_thresholds(text: str, model: SavedModel) -> NDArray[np.float64]:
    import numpy as np

    if text == TUNED:
        tuned = model.tuned_thresholds
        if tuned is None:
            raise ConfigError(f"{model.file} has no tuned thresholds: its run had no validation data. Give a number.")
        return tuned
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--threshold takes a number from 0 to 1, or 'tuned'; it got '{text}'.")
    return np.full(len(model.classes), value)


def predicted_classes(prediction: ImagePrediction, thresholds: NDArray[np.float64], top: int | None) -> list[int]:
    """The predicted classes, the most probable first."""
    if prediction.probabilities is None:
        return []
    order = (-prediction.probabilities).argsort(kind="stable").tolist()
    if top is not None:
        return order[:top]
    return [label for label in order if prediction.probabilities[label] > thresholds[label]]


def format_prediction(prediction: ImagePrediction, chosen: list[int], model: SavedModel) -> str:
    assert prediction.probabilities is not None
    return ", ".join(f"{model.classes[label]} {prediction.probabilities[label]:.3f}" for label in chosen) or "none"


@contextmanager
def progress_over(count: int) -> Iterator[Callable[[], None]]:
    """A progress bar, shown if there is more than one image."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = count < 2 or not (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=quiet) as progress:
        bar = progress.add_task("images", total=count)
        yield lambda: progress.advance(bar)


def export(
    model: RunOrModel,
    to: Annotated[str, typer.Option(help="onnx (extra `export`), pt2 (torch.export) or safetensors.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to. Default: export/ in the folder of the run.")
    ] = None,
    plugins: Plugins = None,
) -> None:
    """Export a model for other programs, with a model card and the preprocessing of images as a script without fedmll.

    Example:  [bold]fedmll export runs/first --to onnx --out first-onnx[/]
    """
    from fedmll.inference.export import export as write

    folder = out or (model if model.is_dir() else model.parent) / "export"
    found, _ = load_model_of(model, plugins)
    for file in write(found, to, folder):
        say(f"written: {file}")


def show_errors(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    top: Annotated[int, typer.Option(min=1, help="Mistakes per class.")] = 5,
    threshold: Annotated[str, typer.Option(help="A number, or `tuned`.")] = "0.5",
    out: Annotated[Path, typer.Option(help="The image file to write.")] = Path("errors.png"),
    plugins: Plugins = None,
) -> None:
    """Show the most confident mistakes on the test data, per class; if the data is available, also as images.

    Example:  [bold]fedmll errors runs/first --top 8[/]
    """
    from fedmll.inference.load_run import load_run
    from fedmll.inference.model_metadata import PluginWarning
    from fedmll.reports.figure import write_image
    from fedmll.reports.figures import image_sheets

    run = load_run(folder, plugins=plugins)
    with warnings_of(PluginWarning):
        kept = run.predictions()
        found = image_sheets.find_mistakes(kept, top, parse_thresholds(threshold, run.model))
    rows = [
        (name, "present" if wrong.present else "absent", f"{wrong.probability:.3f}", kept.name(wrong.sample))
        for name, all_wrong in found.items()
        for wrong in all_wrong
    ]
    print_table("most confident mistakes", ("class", "truth", "probability", "sample"), rows, words=True)
    if not rows:
        return
    try:
        store = image_sheets.load_images(run)
    except (DataError, ConfigError) as error:
        say(f"No sheet of images: {error}")
        return
    write_image(out, image_sheets.draw_mistake_sheet(kept, found, store))
    say(f"images in {out}")


def tune(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    goal: Annotated[
        str,
        typer.Option(
            "--for",
            help="f1; recall=0.9 or precision=0.8 on the validation data; conformal_recall=0.9: a recall "
            "that is guaranteed for new samples.",
        ),
    ] = "f1",
    calibrate: Annotated[
        str, typer.Option(help="Also calibrate probabilities: platt (per class), temperature or none.")
    ] = "none",
    plugins: Plugins = None,
) -> None:
    """Choose a threshold per class on the validation data of a run, for `predict --threshold tuned`.

    Example:  [bold]fedmll tune runs/first --for conformal_recall=0.9 --calibrate platt[/]
    """
    from fedmll.evaluation import thresholds
    from fedmll.evaluation.metrics import mean_of_defined
    from fedmll.inference import tune_thresholds as tuned
    from fedmll.inference.load_run import load_run
    from fedmll.inference.model_metadata import PluginWarning

    with warnings_of(PluginWarning):
        found = tuned.tune(load_run(folder, plugins=plugins), goal, calibrate)

    def print_results(title: str, confusion: Confusion) -> None:
        shares = (100 * confusion.recall, 100 * confusion.precision, 100 * confusion.f1)
        rows = [
            (name, thresholds.format_threshold(threshold), f"{positives:.0f}", *(f"{value:.1f}" for value in values))
            for name, threshold, positives, *values in zip(
                found.classes, found.thresholds, confusion.positives, *shares, strict=True
            )
        ]
        print_table(title, ("class", "threshold", "positives", "recall, %", "precision, %", "F1, %"), rows)

    print_results(f"thresholds for {goal}, on the validation data that they were chosen on", found.confusion)
    if goal.startswith("conformal_recall"):
        say(thresholds.GUARANTEE)
    if found.test is None:
        say("there is no test data: what the thresholds give on other data is not known")
    else:
        print_results("the same thresholds on the test data", found.test)
        say(f"macro F1 on the test data: {100 * mean_of_defined(found.test.f1):.2f} %")
    errors_now = [f"{mean_of_defined(found.before.error):.2f} %"]
    if found.after is not None:
        errors_now.append(f"{mean_of_defined(found.after.error):.2f} % calibrated (on the data it was fitted to)")
    if found.test_reliability is not None:
        errors_now.append(f"{mean_of_defined(found.test_reliability.error):.2f} % on the test data")
    say(f"expected calibration error, mean over classes: {', '.join(errors_now)}")
    say(f"written into {folder / 'model.safetensors'}")
