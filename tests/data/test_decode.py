"""Decoded images: channels, sizes, pixels of more than 8 bits, and files that cannot be decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoded import encode, encoded_files, random_pixels
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.images.decode import EncodedImages, decode_image, decoded_images, resized, scale_to_8_bit


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- what is decoded


def test_colour_png_is_stored_exactly_channels_first() -> None:
    pixels = random_pixels(7, 20, 30, 3)
    store = decoded_images("key", lambda: encoded_files([encode(image) for image in pixels]), None).store
    assert isinstance(store, np.memmap)
    assert np.array_equal(store, pixels.transpose(0, 3, 1, 2))


def test_all_grey_gives_one_channel_and_one_colour_image_gives_three() -> None:
    grey, colour = random_pixels(20, 30), random_pixels(20, 30, 3)
    assert decoded_images("grey", lambda: encoded_files([encode(grey)] * 2), None).store.shape == (2, 1, 20, 30)
    mixed = decoded_images("mixed", lambda: encoded_files([encode(grey), encode(colour)]), None).store
    assert np.array_equal(mixed[0], np.stack([grey] * 3))
    assert np.array_equal(mixed[1], colour.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("sides", "size", "expected"),
    [
        ([(40, 40), (40, 40)], None, (40, 40)),
        ([(128, 100), (128, 100)], None, (128, 100)),
        ([(129, 129), (129, 129)], None, (112, 112)),
        ([(40, 40), (40, 41)], None, (112, 112)),
        ([(40, 40), (30, 60)], 16, (16, 16)),
    ],
)
def test_small_images_of_one_size_keep_their_size(
    sides: list[tuple[int, int]], size: int | None, expected: tuple[int, int]
) -> None:
    files = [encode(random_pixels(*side)) for side in sides]
    assert decoded_images("key", lambda: encoded_files(files), size).store.shape[2:] == expected


def test_resizing_equals_pillows_bilinear_filter() -> None:
    pixels = random_pixels(40, 50, 3)
    expected = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    store = decoded_images("key", lambda: encoded_files([encode(pixels)]), 16).store
    assert np.array_equal(store[0], expected)
    assert np.array_equal(resized(pixels.transpose(2, 0, 1)[None], 16)[0], expected)


def test_resizing_to_the_same_size_copies_nothing() -> None:
    images = random_pixels(2, 3, 16, 16)
    assert resized(images, 16) is images
    assert resized(images, None) is images


def test_16_bit_images_are_scaled_not_clipped() -> None:
    deep = np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=np.uint16)
    assert decode_image(encode(deep), (1, 2, 3)).tolist() == [[[0, 0, 1], [128, 255, 255]]]


def test_progress_counts_every_image() -> None:
    calls: list[tuple[int, int, str]] = []
    files = [encode(random_pixels(4, 4))] * 600
    decoded_images("key", lambda: encoded_files(files), None, progress=lambda *call: calls.append(call))
    decoding = [(done, total) for done, total, what in calls if what == "decoding images"]
    assert decoding == [(256, 600), (512, 600), (600, 600)]


def test_an_image_that_cannot_be_decoded_does_not_stop_the_others() -> None:
    good = encode(random_pixels(64, 64), "JPEG")
    files = [good, b"no image", good[:600], good]
    found = decoded_images("key", lambda: encoded_files(files), None)
    assert list(found.unreadable) == [1, 2]
    assert found.unreadable[1] == "not an image in a supported format"
    assert "truncated" in found.unreadable[2]
    assert np.array_equal(found.store[0], found.store[3])
    assert found.store[0].any()
    assert not found.store[1:3].any()

    def must_not_be_called() -> EncodedImages:
        raise AssertionError("decoded twice")

    assert decoded_images("key", must_not_be_called, None).unreadable == found.unreadable, "the cache remembers them"


@pytest.mark.parametrize("count", [1, 3])
def test_scan_when_no_image_can_be_opened(count: int) -> None:
    found = decoded_images("key", lambda: encoded_files([b"nothing"] * count), None)
    assert list(found.unreadable) == list(range(count))
    assert (found.store.shape[0], found.window, found.notes) == (count, None, ())


def test_disk_error_is_not_reported_as_bad_image(tmp_path: Path, cache_folder: Path) -> None:
    """The next attempt may succeed, so nothing is cached."""
    (tmp_path / "0.png").write_bytes(encode(random_pixels(8, 8)))
    paths = [tmp_path / "0.png", tmp_path / "away.png"]
    images = EncodedImages(2, paths.__getitem__, lambda position: f"'{paths[position]}'")
    with pytest.raises(DataError, match=r"away\.png' cannot be read: No such file"):
        decoded_images("key", lambda: images, None)
    paths[1].write_bytes(encode(random_pixels(8, 8)))
    assert not decoded_images("key", lambda: images, None).unreadable


# --- more than 8 bits


def deep_images(*largest: int) -> list[bytes]:
    return [encode(np.array([[0, value // 2], [value - 1, value]], dtype=np.uint16)) for value in largest]


@pytest.mark.parametrize(
    ("largest", "white"), [(200, 255), (255, 255), (256, 511), (4095, 4095), (3000, 4095), (32768, 65535)]
)
def test_default_window_of_16_bit_images_is_the_number_of_bits_in_use(largest: int, white: int) -> None:
    found = decoded_images("key", lambda: encoded_files(deep_images(largest, 100)), None)
    assert found.window == (0, white)
    assert found.notes == (f"pixels of more than 8 bits: 0 … {white} became 0 … 255 (data.window)",)
    shift = int(white).bit_length() - 8
    assert found.store[0, 0].tolist() == [[0, largest // 2 >> shift], [largest - 1 >> shift, largest >> shift]]
    assert found.store[1, 0].tolist() == [[0, 50 >> shift], [99 >> shift, 100 >> shift]], "one range for the whole set"


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_a_window_of_all_bits_takes_the_upper_eight_exactly(bits: int) -> None:
    values = np.arange(2**bits, dtype=np.uint16)
    assert np.array_equal(scale_to_8_bit(values, (0.0, 2.0**bits - 1)), (values >> (bits - 8)).astype(np.uint8))


def test_a_given_window_clips_and_scales(cache_folder: Path) -> None:
    values = np.array([[0, 100, 199, 200, 250, 300, 301, 5000]], dtype=np.uint16)
    found = decoded_images("key", lambda: encoded_files([encode(values)]), None, ReadingOptions(window=(200, 300)))
    assert found.store[0, 0, 0].tolist() == [0, 0, 0, 0, 128, 255, 255, 255]
    assert found.window == (200, 300)
    other = decoded_images("key", lambda: encoded_files([encode(values)]), None, ReadingOptions(window=(0, 300)))
    assert other.store[0, 0, 0].tolist() == [0, 85, 169, 170, 213, 255, 255, 255], "another window, other images"
    same = decoded_images("key", lambda: encoded_files([encode(values)]), (1, 8), ReadingOptions(window=(0.0, 300.0)))
    assert same.store.filename == other.store.filename  # type: ignore[attr-defined]


def tiff(values: np.ndarray) -> bytes:
    return encode(values, "TIFF")


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bit_images_need_a_window_and_the_error_proposes_one(kind: type) -> None:
    files = [tiff(np.array([[-1000, 0], [500, 3000]], kind)), encode(random_pixels(2, 2))]
    found = decoded_images("key", lambda: encoded_files(files), None)
    assert found.window_problem is not None and found.window_problem.startswith("1 of 2 images need a window: image 0.")
    assert "from -1000 to 3000, and" in found.window_problem
    assert found.window_problem.endswith("for example --set 'data.window=[-1000.0,3000.0]'.")
    read = decoded_images("key", lambda: encoded_files(files), None, ReadingOptions(window=(-1000, 1000)))
    assert not read.unreadable and read.window_problem is None
    assert read.store[0, 0].tolist() == [[0, 128], [192, 255]]


def test_nan_pixels_become_black() -> None:
    files = [tiff(np.array([[np.nan, 1.0], [0.5, np.inf]], np.float32))]
    read = decoded_images("key", lambda: encoded_files(files), None, ReadingOptions(window=(0, 1)))
    assert read.store[0, 0].tolist() == [[0, 255], [128, 255]]


def test_window_of_16_bit_images_is_not_used_for_32_bit_images() -> None:
    files = [*deep_images(4095), tiff(np.ones((2, 2), np.float32))]
    found = decoded_images("key", lambda: encoded_files(files), None)
    assert found.window_problem is not None and "1 of 2 images need a window" in found.window_problem


def test_window_for_8_bit_images_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data\.window is for images with more than 8 bits"):
        decoded_images("key", lambda: encoded_files([encode(random_pixels(2, 2))]), None, ReadingOptions(window=(0, 9)))
    with pytest.raises(ConfigError, match=r"--window is the value that becomes black.*9, 9"):
        ReadingOptions(window=(9, 9), by_options=True)


# --- what the user is told


@pytest.mark.parametrize(
    ("sides", "size", "said"),
    [
        ([(40, 30)], None, ()),
        ([(40, 30)], (40, 30), ()),
        ([(480, 640)], None, ("images: 640 × 480 resized to 112 × 112 (data.size = 112)",)),
        ([(480, 640)], (24, 32), ("images: 640 × 480 resized to 32 × 24 (data.size = [24, 32])",)),
        ([(20, 30), (40, 10)], None, ("images: from 10 × 40 to 30 × 20 resized to 112 × 112 (data.size = 112)",)),
        ([(16, 16), (20, 20)], 20, ("images: from 16 × 16 to 20 × 20 resized to 20 × 20 (data.size = 20)",)),
    ],
)
def test_notes_mention_resizing(sides: list[tuple[int, int]], size: int | None, said: tuple[str, ...]) -> None:
    files = [encode(random_pixels(*side)) for side in sides]
    assert decoded_images("key", lambda: encoded_files(files), size).notes == said


def test_setting_the_derived_size_gives_the_same_images(cache_folder: Path) -> None:
    files = [encode(random_pixels(150, 200))]
    chosen = decoded_images("key", lambda: encoded_files(files), None).store
    assert decoded_images("key", lambda: encoded_files(files), 112).store.filename == chosen.filename  # type: ignore[attr-defined]
    assert len(list(cache_folder.glob("*.npy"))) == 1
