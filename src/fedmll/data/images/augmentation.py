"""Random augmentation of whole batches: each image gets its own random parameters, all from the given generator.

Images are float (B, channels, height, width) in [0, 1]; the result has the same shape and range. The number of random
draws depends only on the number of images, so the same generator gives the same augmentation on every device.

name         operations
none         none
flip         mirrored left-right with probability ½
shift        padded with zeros and cropped at random: moved by at most an eighth of the side (for digits, which have no
mirror image) crop-flip    shift and flip
weak         rotated by ≤ 10°, moved by ≤ 2 %, flip: FedMLP's view
jitter       crop-flip, then brightness, contrast and saturation changed by up to 40 %
strong       weak, then two RandAugment operations, each with probability ½, then a grey square: FixMatch's strong view
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from fedmll.core import registry
from fedmll.core.registry import register

# Deterministic operations on a batch. Each image has its own parameter, so parameters have the shape (B,). They follow
# Pillow's ImageEnhance and ImageOps.

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R 601, as in Pillow
LEVELS = 255


def grey(images: Tensor) -> Tensor:
    """Brightness as one channel."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    weights = torch.tensor(GREY_WEIGHTS, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)[:, None]


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Blend: `share` · image + (1 − share) · other. A share above 1 extrapolates away from the other."""
    return torch.lerp(others.expand_as(images), images, _each(share, images)).clamp_(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * _each(factor, images)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, grey(images).mean(dim=(2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return images if images.shape[1] != 3 else blend(images, grey(images), factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image; the outermost pixels, which have no full neighbourhood, stay as they are."""
    channels = images.shape[1]
    kernel = torch.ones((channels, 1, 3, 3), dtype=images.dtype, device=images.device)
    kernel[:, :, 1, 1] = 5
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = functional.conv2d(images, kernel / 13, groups=channels)
    return blend(images, smooth, factor)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the whole range; a constant channel is not changed."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    flat = high <= low
    stretched = (images - low) / torch.where(flat, torch.ones_like(high), high - low)
    return torch.where(flat, images, stretched)


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel, as Pillow does."""
    levels = _levels(images).flatten(2).long()
    histogram = torch.zeros((*levels.shape[:2], LEVELS + 1), dtype=torch.long, device=images.device)
    histogram.scatter_add_(2, levels, torch.ones_like(levels))
    brightest = histogram.gather(2, levels.amax(dim=2, keepdim=True))
    step = (levels.shape[2] - brightest) // LEVELS
    below = histogram.cumsum(dim=2) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=LEVELS)
    equalized = table.gather(2, levels).to(images.dtype) / LEVELS
    return torch.where(step[..., None] == 0, images, equalized.view_as(images))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep only the highest `bits` of 8 bits."""
    width = _each(2 ** (8 - bits), images)
    return torch.floor(_levels(images) / width) * width / LEVELS


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels at or above `threshold` (0 to 1)."""
    return torch.where(images < _each(threshold, images), images, 1 - images)


def affine(
    images: Tensor,
    degrees: Tensor | float = 0.0,
    right: Tensor | float = 0.0,
    down: Tensor | float = 0.0,
    shear_x: Tensor | float = 0.0,
    shear_y: Tensor | float = 0.0,
    mirror: Tensor | None = None,
) -> Tensor:
    """Rotate anticlockwise about the centre, shear, shift (as a fraction of width and height) and mirror, in one
    resampling.

    The interpolation is bilinear; pixels outside the image are 0.
    """
    count, _, height, width = images.shape
    angle, right, down, shear_x, shear_y = (
        torch.as_tensor(value, dtype=torch.float32, device=images.device).expand(count)
        for value in (degrees, right, down, shear_x, shear_y)
    )
    cosine, sine = torch.cos(angle * math.pi / 180), torch.sin(angle * math.pi / 180)
    # The matrix maps each position of the result to a position in the image, both from -1 to 1 along the sides: undo
    # the shift, then rotate back and shear. The ratio of the sides keeps circles round in images that are not square.
    xx, xy = cosine + shear_x * sine, (shear_x * cosine - sine) * height / width
    yx, yy = (sine + shear_y * cosine) * width / height, cosine - shear_y * sine
    matrix = torch.stack([xx, xy, -2 * (xx * right + xy * down), yx, yy, -2 * (yx * right + yy * down)], dim=1).view(
        count, 2, 3
    )
    if mirror is not None:
        matrix[:, :, 0] *= torch.where(mirror.to(images.device), -1.0, 1.0)[:, None]
    grid = functional.affine_grid(matrix.to(images.dtype), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _each(parameter: Tensor, images: Tensor) -> Tensor:
    return parameter.to(images)[:, None, None, None]


def _levels(images: Tensor) -> Tensor:
    return torch.round(images * LEVELS)


AugmentationOperation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""operation(images, strength, sign): strength from 0.1 to 0.9 and sign ±1 for each image."""

# The operations of FixMatch with their ranges
POOL: dict[str, AugmentationOperation] = {
    "identity": lambda images, strength, sign: images,
    "autocontrast": lambda images, strength, sign: autocontrast(images),
    "equalize": lambda images, strength, sign: equalize(images),
    "brightness": lambda images, strength, sign: brightness(images, 0.05 + 0.9 * strength),
    "contrast": lambda images, strength, sign: contrast(images, 0.05 + 0.9 * strength),
    "saturation": lambda images, strength, sign: saturation(images, 0.05 + 0.9 * strength),
    "sharpness": lambda images, strength, sign: sharpness(images, 0.05 + 0.9 * strength),
    "posterize": lambda images, strength, sign: posterize(images, 4 + torch.floor(4 * strength)),
    "solarize": lambda images, strength, sign: solarize(images, 1 - strength),
    "rotate": lambda images, strength, sign: affine(images, degrees=30 * strength * sign),
    "shear-x": lambda images, strength, sign: affine(images, shear_x=0.3 * strength * sign),
    "shear-y": lambda images, strength, sign: affine(images, shear_y=0.3 * strength * sign),
    "shift-x": lambda images, strength, sign: affine(images, right=0.3 * strength * sign),
    "shift-y": lambda images, strength, sign: affine(images, down=0.3 * strength * sign),
}


def augment(images: Tensor, name: str, generator: Generator) -> Tensor:
    """Apply a registered augmentation; the input is not modified."""
    changed: Tensor = registry.find("augmentation", name)(images, generator)
    return changed


@register("augmentation", "none")
def unchanged(images: Tensor, generator: Generator) -> Tensor:
    return images


@register("augmentation", "flip")
def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left-right with probability ½."""
    mirrored = _random_booleans(len(images), generator).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


@register("augmentation", "shift")
def crop(images: Tensor, generator: Generator, padding: int | None = None) -> Tensor:
    """Pad with zeros on all sides (by default an eighth of the height) and crop to the old size at a random
    position."""
    count, _, height, width = images.shape
    margin = max(1, height // 8) if padding is None else padding
    top, left = torch.randint(2 * margin + 1, (2, count), generator=generator, device=generator.device)
    windows = functional.pad(images, (margin, margin, margin, margin)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]


@register("augmentation", "weak")
def affine_flip(images: Tensor, generator: Generator, degrees: float = 10.0, shift: float = 0.02) -> Tensor:
    """Rotate by ≤ `degrees`, shift by ≤ `shift` of each side, mirror with probability ½, in one resampling."""
    turn, right, down = _uniform(-1, 1, (3, len(images)), generator).to(images.device)
    mirrored = _random_booleans(len(images), generator)
    return affine(images, turn * degrees, right * shift, down * shift, mirror=mirrored)


def colour_jitter(images: Tensor, generator: Generator, strength: float = 0.4) -> Tensor:
    """Change brightness, contrast and saturation, in this order, by factors from 1 - strength to 1 + strength."""
    factors = _uniform(1 - strength, 1 + strength, (3, len(images)), generator)  # grey images draw all three too
    images = brightness(images, factors[0])
    images = contrast(images, factors[1])
    return saturation(images, factors[2])


def cutout(images: Tensor, generator: Generator, side: int | None = None, value: float = 0.5) -> Tensor:
    """Cover a square around a random pixel: 16 pixels wide, or half of a small image; it may extend over the edge."""
    count, _, height, width = images.shape
    length = min(16, height // 2, width // 2) if side is None else side
    centres = torch.rand((2, count), generator=generator, device=generator.device).to(images.device)

    def covered(extent: int, centre: Tensor) -> Tensor:
        first = torch.floor(centre * extent).long() - length // 2
        places = torch.arange(extent, device=images.device)
        return (places >= first[:, None]) & (places < first[:, None] + length)

    hole = covered(height, centres[0])[:, :, None] & covered(width, centres[1])[:, None, :]
    return images.masked_fill(hole[:, None], value)


def rand_augment(images: Tensor, generator: Generator, operations: int = 2, probability: float = 0.5) -> Tensor:
    """Apply random operations of `POOL` to each image, each with the given probability."""
    shape, device = (operations, len(images)), generator.device
    chosen = torch.randint(len(POOL), shape, generator=generator, device=device)
    strength = torch.randint(1, 10, shape, generator=generator, device=device) / 10
    sign = torch.where(_uniform(0, 1, shape, generator) < 0.5, -1.0, 1.0)
    done = _uniform(0, 1, shape, generator) < probability
    result = images.clone()
    for step in range(operations):
        for number, operation in enumerate(POOL.values()):
            here = torch.nonzero(done[step] & (chosen[step] == number)).flatten()
            if len(here):
                places = here.to(images.device)
                parameters = (strength[step, here].to(images.device), sign[step, here].to(images.device))
                result[places] = operation(result[places], *parameters)
    return result


@register("augmentation", "crop-flip")
def _crop_flip(images: Tensor, generator: Generator) -> Tensor:
    return flip(crop(images, generator), generator)


@register("augmentation", "jitter")
def _jitter(images: Tensor, generator: Generator) -> Tensor:
    return colour_jitter(_crop_flip(images, generator), generator)


@register("augmentation", "strong")
def _strong(images: Tensor, generator: Generator) -> Tensor:
    return cutout(rand_augment(affine_flip(images, generator), generator), generator)


def _random_booleans(count: int, generator: Generator) -> Tensor:
    return _uniform(0, 1, (count,), generator) < 0.5


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)
