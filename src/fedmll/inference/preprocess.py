"""Predict image files with the exported model in this folder, without fedmll.

Needs NumPy and Pillow, and onnxruntime (for model.onnx) or torch (for model.pt2). `preprocess.json` has the settings.

    python preprocess.py scan.png …     print the probabilities of image files, as JSON
    python preprocess.py --check        predict the example image and compare with its expected probabilities

In Python: `from preprocess import predict`, then `predict(["scan.png"])`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent
TOLERANCE = 1e-4


def read_settings() -> dict[str, Any]:
    """shape: channels, height and width; window: the values that become 0 and 255, or null; classes; example."""
    settings: dict[str, Any] = json.loads((FOLDER / "preprocess.json").read_text(encoding="utf-8"))
    return settings


def preprocess(source: Any, settings: dict[str, Any]) -> np.ndarray:
    """Turn an image into the model's input: uint8 pixels (channels, height, width).

    `source` is an image file, a Pillow image, or an array (height, width) of values, for example those of a DICOM file
    after its rescale slope and intercept.
    """
    channels, height, width = settings["shape"]
    if isinstance(source, np.ndarray):
        source = source if source.dtype == np.uint8 else source.astype(np.float32)
        image = Image.fromarray(source)
    else:
        image = source if isinstance(source, Image.Image) else Image.open(source)
    image.load()
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # more than 8 bits per pixel: scale the window
        if settings["window"] is None:
            raise ValueError("the image has more than 8 bits per pixel, and the model was trained on 8-bit images")
        low, high = settings["window"]
        values = np.clip(np.nan_to_num(np.asarray(image).astype(np.float64), nan=low), low, high)
        image = Image.fromarray(np.minimum((values - low) * (256 / (high - low)), 255).astype(np.uint8))
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def predict(images: Any, known: np.ndarray | None = None) -> np.ndarray:
    """The probabilities (images, classes). `known` (images, classes), int8, has known labels: 1, 0, or -1 for unknown;
    only some models take it."""
    settings = read_settings()
    pixels = np.stack([preprocess(image, settings) for image in images])
    if known is None and settings["takes_known_labels"]:
        known = np.full((len(pixels), len(settings["classes"])), -1, np.int8)
    inputs = [pixels] if known is None else [pixels, known]
    if (FOLDER / "model.onnx").exists():
        import onnxruntime

        session = onnxruntime.InferenceSession(str(FOLDER / "model.onnx"))
        found: np.ndarray = session.run(None, dict(zip(("images", "known"), inputs, strict=False)))[0]
    else:
        import torch

        module = torch.export.load(FOLDER / "model.pt2").module()
        with torch.no_grad():
            found = module(*map(torch.from_numpy, inputs)).numpy()
    return found


def main(arguments: list[str]) -> int:
    settings = read_settings()
    if arguments == ["--check"]:
        example = settings["example"]
        difference = float(np.abs(predict([FOLDER / example["image"]])[0] - example["probabilities"]).max())
        print(f"{example['image']}: the largest difference to the expected probabilities is {difference:.2g}")
        return int(difference > TOLERANCE)
    if not arguments:
        print(__doc__)
        return 2
    rows = [dict(zip(settings["classes"], map(float, row), strict=True)) for row in predict(arguments)]
    print(json.dumps(dict(zip(arguments, rows, strict=True)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
