"""The commands for a finished model: predict, export, errors, tune."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll.cli.options import Plugins
from fedmll.cli.tables import console, errors, plain_table, say
from fedmll.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedmll.running.images import Prediction
    from fedmll.running.model import SavedModel

SHOWN = 20  # rows in the terminal; a file has all
TUNED = "tuned"

RunOrModel = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, or a model.safetensors.")]


def register(app: typer.Typer) -> None:
    app.command()(predict)
    app.command()(export)
    app.command("errors")(show_errors)
    app.command()(tune)


def predict(
    model: RunOrModel,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES…", help="Image files, or folders of them.")],
    known: Annotated[
        list[str] | None,
        typer.Option("--known", metavar="class=1", help="A label that is known of all of them, 1 or 0; repeatable."),
    ] = None,
    threshold: Annotated[
        str, typer.Option("--threshold", help="What is predicted: p above it; `tuned`: each class's own.")
    ] = "0.5",
    top: Annotated[int | None, typer.Option("--top", min=1, help="Or: the K most probable classes.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="All probabilities: FILE.csv, .json or .parquet.")] = None,
    plugins: Plugins = None,
) -> None:
    """What a trained model says of images: a table, and with --out a file.

    Examples:  [bold]fedmll predict runs/first scan.png[/]  ·  [bold]fedmll predict runs/first IMAGES --out p.csv[/]
    """
    from fedmll.running.images import image_files
    from fedmll.running.saved import SavedRun, run_or_model
    from fedmll.running.written import table_file

    found = run_or_model(model, plugins=plugins)
    used = found.model if isinstance(found, SavedRun) else found
    told = known_in(known)
    cuts = thresholds_in(threshold, used)
    paths = image_files(images)
    shown: list[tuple[str, ...]] = []
    unreadable: list[str] = []
    with ExitStack() as stack:
        write = None if out is None else stack.enter_context(table_file(out, used.classes))
        advance = stack.enter_context(progress_over(len(paths)))
        for prediction in used.stream(paths, told or None):
            chosen = chosen_of(prediction, cuts, top)
            if prediction.probabilities is None:
                unreadable.append(f"{prediction.path} ({prediction.reason})")
            elif len(shown) < SHOWN:
                shown.append((str(prediction.path), listed(prediction, chosen, used)))
            if write is not None:
                write(prediction, [used.classes[label] for label in chosen])
            advance()
        if len(unreadable) == len(paths):
            raise DataError(unreadable_text(unreadable, len(paths)))
    report(shown, len(paths) - len(unreadable), out)
    if unreadable:
        errors.print(f"[yellow]warning:[/] {escape(unreadable_text(unreadable, len(paths)))}", soft_wrap=True)


def report(shown: list[tuple[str, ...]], count: int, out: Path | None) -> None:
    console.print(
        plain_table("predictions", ("image", "classes"), [tuple(map(escape, row)) for row in shown], words=True)
    )
    more = count - len(shown)
    if more:
        say(f"and {more} more" + ("" if out is not None else "; --out FILE.csv has all"))
    if out is not None:
        say(f"every probability in {out}")


def unreadable_text(unreadable: list[str], count: int) -> str:
    from fedmll.data.images.reading import some

    return f"{len(unreadable)} of {count} images cannot be read: {some(unreadable)}."


def known_in(known: list[str] | None) -> dict[str, int]:
    found = {}
    for text in known or ():
        name, equals, value = text.rpartition("=")
        if not equals or value not in ("0", "1"):
            raise ConfigError(f"--known takes class=1 or class=0; it got '{text}'.")
        found[name] = int(value)
    return found


def thresholds_in(text: str, model: SavedModel) -> NDArray[np.float64]:
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


def chosen_of(prediction: Prediction, cuts: NDArray[np.float64], top: int | None) -> list[int]:
    """The predicted classes, the most probable first."""
    if prediction.probabilities is None:
        return []
    order = (-prediction.probabilities).argsort(kind="stable").tolist()
    if top is not None:
        return order[:top]
    return [label for label in order if prediction.probabilities[label] > cuts[label]]


def listed(prediction: Prediction, chosen: list[int], model: SavedModel) -> str:
    assert prediction.probabilities is not None
    return ", ".join(f"{model.classes[label]} {prediction.probabilities[label]:.3f}" for label in chosen) or "none"


def progress_over(count: int) -> Any:
    """A bar for more images than one looks at."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Any:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        quiet = count < 2 or not (console.is_terminal or console.is_jupyter)
        with Progress(*columns, console=console, disable=quiet) as progress:
            bar = progress.add_task("images", total=count)
            yield lambda: progress.advance(bar)

    return shown()


def export(
    model: RunOrModel,
    to: Annotated[str, typer.Option("--to", help="onnx (extra `export`), safetensors or torchscript.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="The folder. Default: export/ in the run's folder.")] = None,
    plugins: Plugins = None,
) -> None:
    """The model for other programs, with a model card: raw pixels in, probabilities out.

    Example:  [bold]fedmll export runs/first --to onnx --out first-onnx[/]
    """
    from fedmll.running.export import export as write
    from fedmll.running.saved import run_or_model

    folder = out or (model if model.is_dir() else model.parent) / "export"
    for file in write(run_or_model(model, plugins=plugins), to, folder):
        say(f"written: {file}")


def show_errors(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    top: Annotated[int, typer.Option("--top", min=1, help="Mistakes a class.")] = 5,
    threshold: Annotated[str, typer.Option("--threshold", help="A number, or `tuned`.")] = "0.5",
    out: Annotated[Path, typer.Option("--out", help="The sheet of images.")] = Path("errors.png"),
    plugins: Plugins = None,
) -> None:
    """The most confident mistakes on the test data, by class; where the data is there, also a sheet of the images.

    Example:  [bold]fedmll errors runs/first --top 8[/]
    """
    from fedmll.analysis import mistakes
    from fedmll.running.saved import load_run

    run = load_run(folder, plugins=plugins)
    kept = run.predictions()
    found = mistakes.mistakes(kept, top, thresholds_in(threshold, run.model))
    rows = [
        (
            escape(name),
            "present" if wrong.present else "absent",
            f"{wrong.probability:.3f}",
            escape(kept.name(wrong.sample)),
        )
        for name, all_wrong in found.items()
        for wrong in all_wrong
    ]
    console.print(plain_table("most confident mistakes", ("class", "truth", "p", "sample"), rows, words=True))
    if not rows:
        return
    try:
        store = mistakes.images_of(run)
    except (DataError, ConfigError) as error:
        say(f"No sheet of images: {error}")
        return
    mistakes.draw(out, kept, found, store)
    say(f"images in {out}")


def tune(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    goal: Annotated[
        str,
        typer.Option(
            "--for",
            help="f1; recall=0.9 or precision=0.8 on the validation data; find=0.9: of new data, with a guarantee.",
        ),
    ] = "f1",
    calibrate: Annotated[
        str, typer.Option("--calibrate", help="Also the probabilities: platt (a class), temperature, none.")
    ] = "none",
    plugins: Plugins = None,
) -> None:
    """Choose each class's threshold on the run's validation data: `predict --threshold tuned` uses it.

    Example:  [bold]fedmll tune runs/first --for find=0.9 --calibrate platt[/]
    """
    from fedmll.evaluation.metrics import mean_of
    from fedmll.running import thresholds, tuned
    from fedmll.running.saved import load_run

    found = tuned.tune(load_run(folder, plugins=plugins), goal, calibrate)
    measured = (found.thresholds, 100 * found.cut.recall, 100 * found.cut.precision, 100 * found.cut.f1)
    rows = [
        (escape(name), f"{threshold:.4f}", *(f"{value:.1f}" for value in values))
        for name, threshold, *values in zip(found.classes, *measured, strict=True)
    ]
    header = ("class", "threshold", "recall, %", "precision, %", "F1, %")
    console.print(plain_table(f"thresholds for {escape(goal)}, on the validation data", header, rows))
    if goal.startswith("find"):
        say(thresholds.GUARANTEE)
    errors_now = [f"{mean_of(found.before.error):.2f} %"]
    if found.after is not None:
        errors_now.append(f"{mean_of(found.after.error):.2f} % calibrated (on the data it was fitted to)")
    say(f"expected calibration error, mean over classes: {', '.join(errors_now)}")
    say(f"written into {folder / 'model.safetensors'}")
