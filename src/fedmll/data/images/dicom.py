"""DICOM files as images (extra `dicom`): rescaled values, for example Hounsfield units, as 32-bit pixels.

As for all 32-bit images, `data.window` gives the values that become black and white.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fedmll.core.errors import DataError

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
        raise ValueError(f"pydicom cannot read this DICOM image: {error}") from None
    if values.ndim != 2:
        raise ValueError(f"a DICOM image must have one frame and one channel; this one has the shape {values.shape}")
    if found.get("PhotometricInterpretation") == "MONOCHROME1":  # the lowest value is white
        values = -values
    return Image.fromarray(values)
