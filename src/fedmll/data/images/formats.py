"""Image formats: open a file of any supported format, and find image files in a folder.

DICOM (extra `dicom`) has rescaled values, for example Hounsfield units, as 32-bit pixels. As for all 32-bit images,
`data.window` gives the values that become black and white.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.core.errors import DataError

DICOM_ENDINGS = (".dcm", ".dicom")
IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp"}

GREY_MODES = ("1", "L", "LA", "I;16", "I;16L", "I;16B", "I;16N", "I", "F")
WIDE_MODES = ("I", "F")  # 32-bit samples
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # of an image that cannot be read


def open_image(source: Path | bytes | NDArray[np.uint8]) -> Image.Image:
    """Open a file, encoded bytes, or pixels (height, width, channels)."""
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    if isinstance(source, Path) and source.suffix.lower() in DICOM_ENDINGS:
        return _open_dicom(source)
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def find_images(folder: Path) -> Iterator[Path]:
    """The image files in a folder and its subfolders; none if the folder does not exist."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())


def _open_dicom(file: Path) -> Image.Image:
    try:
        import pydicom
        from pydicom.pixels import apply_modality_lut
    except ImportError:
        raise DataError(f"'{file}' is a DICOM file; to read it: pip install 'fedmll[dicom]'.") from None
    try:
        found = pydicom.dcmread(file)
        values = np.asarray(apply_modality_lut(found.pixel_array, found), dtype=np.float32)
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        raise ValueError(f"pydicom cannot read this DICOM image: {error}") from None
    if values.ndim != 2:
        raise ValueError(f"a DICOM image must have one frame and one channel; this one has the shape {values.shape}")
    if found.get("PhotometricInterpretation") == "MONOCHROME1":  # the lowest value is white
        values = -values
    return Image.fromarray(values)
