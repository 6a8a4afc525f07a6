"""Image formats: open a file of a supported format, and find image files in a folder.

Files come from other people. Only the formats listed here are opened (Pillow would start Ghostscript for an EPS file),
and nothing is decoded that has more pixels or bytes than the limits below.

DICOM (extra `dicom`): unsigned pixels without rescaling are 16-bit pixels, as in a 16-bit PNG. Rescaled values, for
example Hounsfield units, are 32-bit pixels: `data.window` gives the values that become black and white.
"""

from __future__ import annotations

import io
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.core.errors import DataError

ENDINGS = {  # by Pillow's name of the format
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "JPEG": (".jpg", ".jpeg"),
    "JPEG2000": (".jp2", ".j2k"),
    "PNG": (".png",),
    "PPM": (".pbm", ".pgm", ".pnm", ".ppm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
DICOM_ENDINGS = (".dcm", ".dicom")
IMAGE_ENDINGS = {ending for endings in (*ENDINGS.values(), DICOM_ENDINGS) for ending in endings}
MAX_PIXELS = 89_478_485  # the size from which Pillow warns of a decompression bomb; 9,459 × 9,459
MAX_DICOM_BYTES = 2**29  # in the file, and after inflating it

GREY_MODES = ("1", "L", "LA", "I;16", "I;16L", "I;16B", "I;16N", "I", "F")
WIDE_MODES = ("I", "F")  # 32-bit samples
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # of an image that cannot be read


def open_image(source: Path | bytes | NDArray[np.uint8]) -> Image.Image:
    """Open a file, encoded bytes, or pixels (height, width, channels)."""
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):  # opening a pipe would wait for ever
        raise ValueError("it is not a regular file, but a folder, pipe or device")
    if isinstance(source, Path) and source.suffix.lower() in DICOM_ENDINGS:
        return _open_dicom(source)
    image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=tuple(ENDINGS))
    check_pixels(image.height, image.width)
    return image


def find_images(folder: Path) -> Iterator[Path]:
    """The image files in a folder and its subfolders; none if the folder does not exist."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())


def describe_image_error(error: Exception) -> str:
    """Why an image cannot be read, for one of `IMAGE_ERRORS`."""
    if isinstance(error, Image.UnidentifiedImageError):  # its message repeats the path
        return "not an image in a supported format"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MAX_PIXELS:,} pixels, which may be a decompression bomb"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def check_pixels(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width} × {height} pixels are more than {MAX_PIXELS:,}, which may be a decompression bomb")


def _open_dicom(file: Path) -> Image.Image:
    try:
        import pydicom
        from pydicom.pixels import apply_modality_lut
    except ImportError:
        raise DataError(f"'{file}' is a DICOM file; to read it: pip install 'fedmll[dicom]'.") from None
    try:
        _check_dicom_bytes(file)
        found = pydicom.dcmread(file)
        frames, channels = int(found.get("NumberOfFrames") or 1), int(found.SamplesPerPixel)
        if (frames, channels) != (1, 1):
            raise ValueError(f"an image must have one frame and one channel; it has {frames} and {channels}")
        check_pixels(int(found.Rows), int(found.Columns))
        stored = found.pixel_array
        values = apply_modality_lut(stored, found)
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        raise ValueError(f"pydicom cannot read this DICOM image: {error}") from None
    inverted = found.get("PhotometricInterpretation") == "MONOCHROME1"  # the lowest value is white
    if stored.dtype.kind == "u" and stored.itemsize <= 2 and np.array_equal(values, stored):
        white = np.uint16(2 ** int(found.BitsStored) - 1)
        plain = stored.astype(np.uint16)
        return Image.fromarray(white - np.minimum(plain, white) if inverted else plain)
    return Image.fromarray(np.asarray(-values if inverted else values, dtype=np.float32))


def _check_dicom_bytes(file: Path) -> None:
    """Reject a file that is too large, or would be after inflating: pydicom inflates all of it at once."""
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    def ends_header(tag: Any, representation: Any, length: Any) -> bool:
        return bool(tag.group != 2)

    with file.open("rb") as stream:
        read_preamble(stream, force=False)
        header = read_dataset(stream, is_implicit_VR=False, is_little_endian=True, stop_when=ends_header)
        size = file.stat().st_size
        if header.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
            inflater, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
            while size <= MAX_DICOM_BYTES and (block := stream.read(2**16)):
                size += len(inflater.decompress(block))
    if size > MAX_DICOM_BYTES:
        raise ValueError(f"its data has more than {MAX_DICOM_BYTES:,} bytes, which may be a decompression bomb")
