"""Augmentation: operations compared with Pillow's and torch's; augmentations with their definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.data.images import augmentation
from fedmll.data.images.augmentation import (
    POOL,
    affine_flip,
    augment,
    colour_jitter,
    crop,
    cutout,
    flip,
    rand_augment,
)

COUNT = 40


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(channels: int = 3, height: int = 24, width: int = 20, count: int = COUNT) -> Tensor:
    """Smooth pictures with 256 levels, as decoded images have."""
    rough = torch.rand((count, channels, 5, 4), generator=generator(9))
    smooth = torch.nn.functional.interpolate(rough, size=(height, width), mode="bicubic").clamp(0, 1)
    return torch.round(smooth * 255) / 255


def as_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255


def largest_difference(ours: Tensor, pillow: list[Image.Image]) -> float:
    """In levels of 255."""
    return float((ours - torch.stack([from_pillow(image) for image in pillow])).abs().max() * 255)


FACTORS = torch.linspace(0.05, 1.6, COUNT)


@pytest.mark.parametrize(
    ("ours", "enhancer"),
    [
        (augmentation.brightness, ImageEnhance.Brightness),
        (augmentation.contrast, ImageEnhance.Contrast),
        (augmentation.saturation, ImageEnhance.Color),
        (augmentation.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancements_equal_pillows(ours: Callable[[Tensor, Tensor], Tensor], enhancer: Callable) -> None:
    images = pictures()
    expected = [enhancer(as_pillow(image)).enhance(float(f)) for image, f in zip(images, FACTORS, strict=True)]
    assert largest_difference(ours(images, FACTORS), expected) <= 2  # Pillow rounds in between


def test_equalize_equals_pillows_exactly() -> None:
    images = pictures(height=40, width=33)
    images[0] = 0.2  # one value: nothing to equalise
    images[1, :, :20] = 0.4
    assert largest_difference(augmentation.equalize(images), [ImageOps.equalize(as_pillow(x)) for x in images]) < 0.01


def test_autocontrast_equals_pillows() -> None:
    images = pictures() * 0.5 + 0.2
    images = torch.round(images * 255) / 255
    images[3, 1] = 0.6
    expected = [ImageOps.autocontrast(as_pillow(image)) for image in images]
    assert largest_difference(augmentation.autocontrast(images), expected) <= 1.01


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
def test_posterize_equals_pillows_exactly(bits: int) -> None:
    images = pictures()
    ours = augmentation.posterize(images, torch.full((COUNT,), float(bits)))
    assert largest_difference(ours, [ImageOps.posterize(as_pillow(image), bits) for image in images]) < 0.01


def test_solarize_equals_pillows_exactly() -> None:
    images = pictures()
    ours = augmentation.solarize(images, torch.full((COUNT,), 128 / 255))
    assert largest_difference(ours, [ImageOps.solarize(as_pillow(image), 128) for image in images]) < 0.01


@pytest.mark.parametrize("degrees", [-30.0, 7.0, 90.0])
def test_rotation_equals_pillows_also_if_not_square(degrees: float) -> None:
    images = pictures(height=24, width=20)
    ours = augmentation.affine(images, degrees=degrees)
    expected = torch.stack([from_pillow(as_pillow(x).rotate(degrees, Image.Resampling.BILINEAR)) for x in images])
    inside = (slice(None), slice(None), slice(8, 16), slice(6, 14))  # at the border the two fill differently
    assert (ours - expected)[inside].abs().max() * 255 < 2


def test_shifts_move_right_and_down_and_bring_in_zeros() -> None:
    images = pictures(height=20, width=20)
    moved = augmentation.affine(images, right=0.1, down=-0.2)
    assert torch.allclose(moved[:, :, :16, 2:], images[:, :, 4:, :18], atol=1e-5)
    assert moved[:, :, :, :2].abs().max() < 1e-4
    assert moved[:, :, 16:].abs().max() < 1e-4


def test_shear_leaves_the_middle_row_and_moves_others_by_their_distance() -> None:
    images = pictures(height=21, width=21)
    sheared = augmentation.affine(images, shear_x=1.0)
    assert torch.allclose(sheared[:, :, 10], images[:, :, 10], atol=1e-5)
    assert torch.allclose(sheared[:, :, 13, :18], images[:, :, 13, 3:], atol=1e-4)


def test_mirroring_in_the_affine_is_a_flip() -> None:
    images = pictures()
    mirror = torch.arange(COUNT) % 2 == 0
    ours = augmentation.affine(images, mirror=mirror)
    assert torch.allclose(ours[::2], images[::2].flip(3), atol=1e-5)
    assert torch.allclose(ours[1::2], images[1::2], atol=1e-5)


# --- the random operations


def test_flip_mirrors_some_images_and_leaves_the_others() -> None:
    images = pictures(count=400)
    flipped = flip(images, generator())
    mirrored = (flipped == torch.flip(images, [3])).flatten(1).all(dim=1)
    untouched = (flipped == images).flatten(1).all(dim=1)
    assert (mirrored ^ untouched).all()
    assert 150 < int(mirrored.sum()) < 250


def test_crop_is_a_whole_number_shift_with_zeros() -> None:
    images = pictures(height=24, width=20, count=200)
    cropped = crop(images, generator(), padding=2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    shifts = set()
    for image, result in zip(padded, cropped, strict=True):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(image[:, y : y + 24, x : x + 20], result)]
        assert len(found) == 1
        shifts.add(found[0])
    assert len(shifts) == 25, "every shift happens"


def test_crop_moves_by_an_eighth_of_the_side() -> None:
    images = torch.ones((200, 1, 16, 16))
    rows = crop(images, generator())[:, 0].amax(dim=2)
    assert int((rows == 0).sum(dim=1).max()) == 2


def test_weak_rotates_by_at_most_ten_degrees_and_shifts_by_at_most_two_percent() -> None:
    side = 101
    images = torch.zeros((300, 1, side, side))
    images[:, :, 50, 80] = 1  # 30 right of the centre
    views = affine_flip(torch.nn.functional.max_pool2d(images, 5, 1, 2), generator())[:, 0]
    mass = views.sum(dim=(1, 2))
    axis = torch.arange(side, dtype=torch.float32) - 50
    x = (views.sum(dim=1) * axis).sum(dim=1) / mass
    y = (views.sum(dim=2) * axis).sum(dim=1) / mass
    assert 100 < int((x < 0).sum()) < 200, "half of them are mirrored"
    reach = 30 * np.sin(np.radians(10)) + 0.02 * side
    assert float(y.abs().max()) < reach + 0.5
    assert float(y.abs().max()) > 0.8 * reach
    assert float((x.abs() - 30).abs().max()) < 0.02 * side + 1


def test_jitter_changes_colours_but_not_positions() -> None:
    images = torch.full((100, 3, 4, 4), 0.5)
    images[:, 0] = 0.6
    jittered = colour_jitter(images, generator())
    assert (jittered.amax(dim=(2, 3)) == jittered.amin(dim=(2, 3))).all()
    means = jittered.mean(dim=(1, 2, 3))
    assert 0.3 < float(means.min()) < 0.4
    assert 0.65 < float(means.max()) < 0.76


def test_cutout_is_one_grey_square() -> None:
    images = torch.ones((200, 2, 32, 32))
    holes = cutout(images, generator()) == 0.5
    assert torch.equal(holes[:, 0], holes[:, 1])
    rows, columns = holes[:, 0].any(dim=2).sum(dim=1), holes[:, 0].any(dim=1).sum(dim=1)
    assert torch.equal(rows * columns, holes[:, 0].sum(dim=(1, 2)))
    assert int(rows.max()) == int(columns.max()) == 16
    assert int(rows.min()) >= 8
    assert (images == 1).all(), "the input is not written to"


def test_rand_augment_leaves_about_a_quarter_of_the_images_unchanged() -> None:
    images = pictures(count=1000)
    same = (rand_augment(images, generator()) == images).flatten(1).all(dim=1).float().mean()
    # neither of two operations with probability ½, or the identity: (1 - ½ · 13/14)² = 0.287
    assert 0.23 < float(same) < 0.35


@pytest.mark.parametrize("name", POOL)
def test_every_strong_operation_keeps_shape_and_range(name: str) -> None:
    for channels in (1, 3):
        images = pictures(channels)
        result = POOL[name](images, torch.full((COUNT,), 0.9), torch.ones(COUNT))
        assert result.shape == images.shape
        assert float(result.min()) >= -1e-6
        assert float(result.max()) <= 1 + 1e-6
        if name != "identity" and not (name == "saturation" and channels == 1):
            assert not torch.equal(result, images)


# --- the recipes


@pytest.mark.parametrize("recipe", registry.all_of("augmentation"))
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_keeps_shape_range_and_input_and_repeats_with_its_seed(recipe: str, channels: int) -> None:
    images = pictures(channels, height=8, width=8)
    before = images.clone()
    one, same, other = (augment(images, recipe, generator(seed)) for seed in (1, 1, 2))
    assert one.shape == images.shape
    assert one.dtype == torch.float32
    assert float(one.min()) >= -1e-6
    assert float(one.max()) <= 1 + 1e-6
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (recipe == "none")
    assert torch.equal(images, before)


@pytest.mark.parametrize("recipe", registry.all_of("augmentation"))
def test_random_draws_depend_only_on_the_generator(recipe: str) -> None:
    """The state of the generator afterwards does not depend on the images; torch's global generator is not used."""
    used = []
    for seed, images in ((1, torch.zeros((COUNT, 1, 8, 8))), (2, pictures(3, 24, 20))):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        draws = generator(7)
        augment(images, recipe, draws)
        assert torch.equal(torch.get_rng_state(), before)
        used.append(draws.get_state())
    assert torch.equal(used[0], used[1])


def test_unknown_augmentation_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'crop-flip'"):
        augment(pictures(), "cropflip", generator())
