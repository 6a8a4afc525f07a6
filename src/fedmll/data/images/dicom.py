"""DICOM files as images (extra `dicom`): the values that the scanner means, e.g. Hounsfield units, as 32-bit pixels.

What is black and what is white in them says `data.window`, as for every image of 32 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fedmll.errors import DataError

ENDINGS = (".dcm", ".dicom")


def open_dicom(file: Path) -> Image.Image:
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
        raise ValueError(f"not a DICOM image that pydicom reads: {error}") from None
    if values.ndim != 2:
        raise ValueError(f"a DICOM image of one frame and one channel is needed, this one is {values.shape}")
    if found.get("PhotometricInterpretation") == "MONOCHROME1":  # the lowest value is white there
        values = -values
    return Image.fromarray(values)
