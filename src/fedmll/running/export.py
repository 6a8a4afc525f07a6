"""A model for other programs: ONNX, TorchScript, or its safetensors file, beside a model card.

ONNX and TorchScript take raw samples and give probabilities: pixels are scaled inside, any number of samples may come.
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

from fedmll import files
from fedmll.errors import ConfigError
from fedmll.running.card import card
from fedmll.running.folder import MODEL
from fedmll.running.model import SavedModel, recalibrated_tensor
from fedmll.running.saved import SavedRun

FORMATS = ("onnx", "safetensors", "torchscript")
INPUT, KNOWN, OUTPUT = "images", "known", "probabilities"
FEATURES = "features"  # the input's name where samples are feature vectors
OPSET = 17


class Deployed(nn.Module):
    """Raw samples → probabilities. `known` (1 or N, classes): 1, 0, -1 unknown; where the model cannot use it: None."""

    def __init__(self, model: SavedModel) -> None:
        super().__init__()
        self.learner = model.learner
        self.network = copy.deepcopy(self.learner.model).requires_grad_(False)
        self.by = None if model.calibration is None else torch.from_numpy(model.calibration).float()

    def forward(self, samples: Tensor, known: Tensor | None = None) -> Tensor:
        if known is not None:
            known = known.expand(samples.shape[0], known.shape[1])
        found = self.learner.method.predict(self.network, self.learner.task.inputs(samples), known)
        return found if self.by is None else recalibrated_tensor(found, self.by)


def export(source: SavedRun | SavedModel, to: str, out: Path) -> list[Path]:
    """Write the model and its card (README.md) into the folder `out`."""
    if to not in FORMATS:
        raise ConfigError(f"A model can be exported to {', '.join(FORMATS)}; not to '{to}'.")
    model = source.model if isinstance(source, SavedRun) else source
    file = out / {"onnx": "model.onnx", "safetensors": MODEL, "torchscript": "model.pt"}[to]
    if file.exists() and file.samefile(model.file):
        raise ConfigError(f"{out} holds the model that is to be exported; choose another --out.")
    if to == "onnx":
        write_onnx(model, file)
    elif to == "torchscript":
        _write_torchscript(model, file)
    else:
        with files.replacing(file) as temporary:
            shutil.copyfile(model.file, temporary)
    readme = out / "README.md"
    files.write(readme, card(source, file.name))
    return [file, readme]


def write_onnx(model: SavedModel, file: Path) -> None:
    """By torch's tracing exporter: the one that gives the network's own numbers for every head here."""
    try:
        import onnx
    except ImportError:
        raise ConfigError("ONNX needs a package that is not installed: pip install 'fedmll[export]'.") from None
    names = [FEATURES if len(model.sample_shape) == 1 else INPUT, *([KNOWN] if model.takes_known_labels else [])]
    with files.replacing(file) as temporary, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: what is constant here is the shape of a sample
        torch.onnx.export(
            Deployed(model).eval(),
            _example(model),
            str(temporary),
            input_names=names,
            output_names=[OUTPUT],
            dynamic_axes={name: {0: "batch"} for name in (names[0], OUTPUT)} | {KNOWN: {0: "batch_or_1"}},
            opset_version=OPSET,
            dynamo=False,
        )
        graph = onnx.load(str(temporary))
        if model.takes_known_labels:  # an input with a value of its own may be left out
            unknown = torch.full((1, len(model.classes)), -1, dtype=torch.int8).numpy()
            graph.graph.initializer.append(onnx.numpy_helper.from_array(unknown, KNOWN))
        for key, value in _facts(model).items():
            graph.metadata_props.add(key=key, value=value)
        onnx.checker.check_model(graph)
        onnx.save(graph, str(temporary))


def _write_torchscript(model: SavedModel, file: Path) -> None:
    with files.replacing(file) as temporary, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Deployed(model).eval(), _example(model), check_trace=False)
        torch.jit.save(traced, str(temporary), _extra_files=_facts(model))


def _example(model: SavedModel) -> tuple[Tensor, ...]:
    """Two samples: of one, torch would take the number for a constant."""
    images = len(model.sample_shape) == 3
    samples = torch.zeros(2, *model.sample_shape, dtype=torch.uint8 if images else torch.float32)
    known = torch.full((2, len(model.classes)), -1, dtype=torch.int8)
    return (samples, known) if model.takes_known_labels else (samples,)


def _facts(model: SavedModel) -> dict[str, str]:
    facts: dict[str, Any] = {"classes": list(model.classes), "thresholds": model.description["thresholds"]}
    return {name: json.dumps(value) for name, value in facts.items()} | {"fedmll": json.dumps(model.description)}
