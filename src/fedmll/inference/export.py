"""A model for other programs: ONNX, a program of torch.export, or its safetensors file, with a model card.

ONNX and torch.export take pixels of 8 bits in the model's size and return probabilities: pixels are scaled and
probabilities are calibrated inside, and the batch size is free. What comes before (reading a file, the window of images
with more than 8 bits, colours, resizing) is Pillow's arithmetic, which no graph repeats exactly; `preprocess.py` beside
the model does it without fedmll. An example image with its expected probabilities shows that all is right.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.evaluation.calibration import calibrate_tensor
from fedmll.inference.load_run import SavedRun
from fedmll.inference.model_card import Example, build_model_card
from fedmll.inference.model_file import SavedModel
from fedmll.runs.run_folder import MODEL_FILE

FORMATS = {"onnx": "model.onnx", "safetensors": MODEL_FILE, "pt2": "model.pt2"}
INPUT, KNOWN, OUTPUT = "images", "known", "probabilities"
FEATURES = "features"  # the name of the input for feature vectors
OPSET = 17


class ExportedModel(nn.Module):
    """Raw samples → probabilities. `known` (1 or N, classes) has 1, 0 and -1 for unknown; None if the model cannot use
    known labels."""

    def __init__(self, model: SavedModel) -> None:
        super().__init__()
        self.trainer = model.trainer
        self.network = copy.deepcopy(self.trainer.model).requires_grad_(False)
        self.calibration = None if model.calibration is None else torch.from_numpy(model.calibration).float()

    def forward(self, samples: Tensor, known: Tensor | None = None) -> Tensor:
        if known is not None:
            known = known.expand(samples.shape[0], known.shape[1])
        found = self.trainer.method.predict(self.network, self.trainer.task.preprocess(samples), known)
        return found if self.calibration is None else calibrate_tensor(found, self.calibration)


def export(source: SavedRun | SavedModel, to: str, out: Path) -> list[Path]:
    """Write the model, its card (README.md) and, if other programs use it, its preprocessing into a folder.

    Args:
        source: a run or a model. Only the card of a run has metrics.
        to: onnx, safetensors or pt2 (torch.export).
        out: the folder.

    Returns:
        The files: the model, the card, then the others.
    """
    if to not in FORMATS:
        raise ConfigError(f"A model can be exported to {', '.join(FORMATS)}; not to '{to}'.")
    model = source.model if isinstance(source, SavedRun) else source
    _ = model.trainer  # a file that does not hold the model that it describes is rejected
    file = out / FORMATS[to]
    if file.exists() and file.samefile(model.file):
        raise ConfigError(f"{out} holds the model itself; choose another --out.")
    if to == "onnx":
        write_onnx(model, file)
    elif to == "pt2":
        _write_pt2(model, file)
    else:
        with files.atomic_replace(file) as temporary:
            shutil.copyfile(model.file, temporary)
    example = None
    others: list[Path] = []
    if to != "safetensors" and len(model.sample_shape) == 3 and model.sample_shape[0] in (1, 3):
        example = write_example(model, out)
        others = [*write_preprocessing(model, out, example), out / example.image]
    readme = out / "README.md"
    files.write_atomic(readme, build_model_card(source, file.name, example))
    return [file, readme, *others]


def write_example(model: SavedModel, out: Path) -> Example:
    """Write an image of noise, in another size than the model's and with as many bits as its training images."""
    channels, height, width = model.sample_shape
    noise = np.random.default_rng(0).random((height + 3, 2 * width, channels))
    window, name = model.description["window"], "example.png"
    if window is None:
        pixels = np.round(255 * noise).astype(np.uint8)
        image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    else:
        low, high = window
        values = low + (high - low) * noise[..., 0]
        if low >= 0 and high <= 65535:
            image = Image.fromarray(np.round(values).astype(np.uint16))
        else:
            image, name = Image.fromarray(values.astype(np.float32)), "example.tif"
    with files.atomic_replace(out / name) as temporary:
        image.save(temporary, Path(name).suffix[1:].replace("tif", "tiff"))
    return Example(image=name, probabilities=model.predict(out / name)[0].tolist())


def write_preprocessing(model: SavedModel, out: Path, example: Example) -> list[Path]:
    """Write `preprocess.py`, a copy of the module in this package, and `preprocess.json` with its settings."""
    found = importlib.util.find_spec("fedmll.inference.preprocess")
    assert found is not None and found.origin is not None
    settings = {
        "shape": model.sample_shape,
        "window": model.description["window"],
        "classes": model.classes,
        "thresholds": model.description["thresholds"],
        "takes_known_labels": model.takes_known_labels,
        "example": {"image": example.image, "probabilities": example.probabilities},
    }
    script, values = out / "preprocess.py", out / "preprocess.json"
    files.write_atomic(script, Path(found.origin).read_bytes())
    files.write_atomic(values, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    return [script, values]


def write_onnx(model: SavedModel, file: Path) -> None:
    """Use torch's tracing exporter: it reproduces the numbers of every head here."""
    try:
        import onnx
    except ImportError:
        raise ConfigError("ONNX needs a package that is not installed: pip install 'fedmll[export]'.") from None
    names = [FEATURES if len(model.sample_shape) == 1 else INPUT, *([KNOWN] if model.takes_known_labels else [])]
    with files.atomic_replace(file) as temporary, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns about constants; here they are shapes of samples
        torch.onnx.export(
            _exported(model),
            _example(model),
            str(temporary),
            input_names=names,
            output_names=[OUTPUT],
            dynamic_axes={name: {0: "batch"} for name in (names[0], OUTPUT)} | {KNOWN: {0: "batch_or_1"}},
            opset_version=OPSET,
            dynamo=False,
        )
        graph = onnx.load(str(temporary))
        if model.takes_known_labels:  # an input with a default value is optional
            unknown = torch.full((1, len(model.classes)), -1, dtype=torch.int8).numpy()
            graph.graph.initializer.append(onnx.numpy_helper.from_array(unknown, KNOWN))
        for key, value in _metadata(model).items():
            graph.metadata_props.add(key=key, value=value)
        onnx.checker.check_model(graph)
        onnx.save(graph, str(temporary))


def _write_pt2(model: SavedModel, file: Path) -> None:
    """A program of torch.export: `torch.export.load(FILE).module()`."""
    example, batch = _example(model), torch.export.Dim("batch", min=1)
    with files.atomic_replace(file) as temporary, torch.no_grad():
        program = torch.export.export(_exported(model), example, dynamic_shapes=tuple({0: batch} for _ in example))
        with temporary.open("wb") as opened:
            torch.export.save(program, opened, extra_files=_metadata(model))


def _exported(model: SavedModel) -> ExportedModel:
    """It is run once, so that values that it computes once and keeps are not computed inside the graph."""
    exported = ExportedModel(model).eval()
    with torch.no_grad():
        exported(*_example(model))
    return exported


def _example(model: SavedModel) -> tuple[Tensor, ...]:
    """Two samples: torch would treat a batch size of one as a constant."""
    images = len(model.sample_shape) == 3
    samples = torch.zeros(2, *model.sample_shape, dtype=torch.uint8 if images else torch.float32)
    known = torch.full((2, len(model.classes)), -1, dtype=torch.int8)
    return (samples, known) if model.takes_known_labels else (samples,)


def _metadata(model: SavedModel) -> dict[str, str]:
    values: dict[str, Any] = {"classes": list(model.classes), "thresholds": model.description["thresholds"]}
    return {name: json.dumps(value) for name, value in values.items()} | {"fedmll": json.dumps(model.description)}
