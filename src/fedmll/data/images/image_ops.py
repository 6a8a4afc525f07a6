"""What can be done to a batch of images when each has its own strength. Nothing here is random.

Images are float (B, channels, height, width) in [0, 1], and so is what comes back; parameters are (B,). The operations
are those of Pillow's ImageEnhance and ImageOps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R 601, as in Pillow
LEVELS = 255


def grey(images: Tensor) -> Tensor:
    """Brightness as one channel."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    weights = torch.tensor(GREY_WEIGHTS, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)[:, None]


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """`share` of the image and the rest of the other; a share above 1 moves away from the other."""
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
    """Every channel stretched to the whole range; a channel of one value stays."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    flat = high <= low
    stretched = (images - low) / torch.where(flat, torch.ones_like(high), high - low)
    return torch.where(flat, images, stretched)


def equalize(images: Tensor) -> Tensor:
    """Every channel with its histogram levelled, by Pillow's rule."""
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
    """Only the highest `bits` of 8 are kept."""
    width = _each(2 ** (8 - bits), images)
    return torch.floor(_levels(images) / width) * width / LEVELS


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Pixels from `threshold` (0 to 1) up are inverted."""
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
    """Rotate anticlockwise about the centre, shear, shift (as a share of width and height) and mirror: one resampling.

    Bilinear; what comes from outside is 0.
    """
    count, _, height, width = images.shape
    angle, right, down, shear_x, shear_y = (
        torch.as_tensor(value, dtype=torch.float32, device=images.device).expand(count)
        for value in (degrees, right, down, shear_x, shear_y)
    )
    cosine, sine = torch.cos(angle * math.pi / 180), torch.sin(angle * math.pi / 180)
    # From each place of the result to its place in the image, both from -1 to 1 over the sides: undo the shift, then
    # rotate back and shear. The ratio of the sides keeps circles round on images that are not square.
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
