"""A model for other programs: ONNX, TorchScript, or its safetensors file, with a model card.

ONNX and TorchScript take raw samples and return probabilities: pixels are scaled inside, and the batch size is free.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.evaluation.calibration import calibrate_tensor
from fedmll.inference.load import SavedRun
from fedmll.inference.model_card import build_model_card
from fedmll.inference.model_file import SavedModel
from fedmll.runs.run_folder import MODEL_FILE

FORMATS = ("onnx", "safetensors", "torchscript")
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
    """Write the model and its card (README.md) into a folder.

    Args:
        source: a run or a model. Only the card of a run has metrics.
        to: onnx, safetensors or torchscript.
        out: the folder.

    Returns:
        The files.
    """
    if to not in FORMATS:
        raise ConfigError(f"A model can be exported to {', '.join(FORMATS)}; not to '{to}'.")
    model = source.model if isinstance(source, SavedRun) else source
    _ = model.trainer  # a file that does not hold the model that it describes is rejected
    file = out / {"onnx": "model.onnx", "safetensors": MODEL_FILE, "torchscript": "model.pt"}[to]
    if file.exists() and file.samefile(model.file):
        raise ConfigError(f"{out} holds the model itself; choose another --out.")
    if to == "onnx":
        write_onnx(model, file)
    elif to == "torchscript":
        _write_torchscript(model, file)
    else:
        with files.atomic_replace(file) as temporary:
            shutil.copyfile(model.file, temporary)
    readme = out / "README.md"
    files.write_atomic(readme, build_model_card(source, file.name))
    return [file, readme]


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
            ExportedModel(model).eval(),
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


def _write_torchscript(model: SavedModel, file: Path) -> None:
    with files.atomic_replace(file) as temporary, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ExportedModel(model).eval(), _example(model), check_trace=False)
        torch.jit.save(traced, str(temporary), _extra_files=_metadata(model))


def _example(model: SavedModel) -> tuple[Tensor, ...]:
    """Two samples: torch would treat a batch size of one as a constant."""
    images = len(model.sample_shape) == 3
    samples = torch.zeros(2, *model.sample_shape, dtype=torch.uint8 if images else torch.float32)
    known = torch.full((2, len(model.classes)), -1, dtype=torch.int8)
    return (samples, known) if model.takes_known_labels else (samples,)


def _metadata(model: SavedModel) -> dict[str, str]:
    values: dict[str, Any] = {"classes": list(model.classes), "thresholds": model.description["thresholds"]}
    return {name: json.dumps(value) for name, value in values.items()} | {"fedmll": json.dumps(model.description)}
