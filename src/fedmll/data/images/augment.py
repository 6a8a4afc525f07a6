"""Random augmentation of whole batches: every image has its own draw, and all draws come from the generator passed.

Images are float (B, channels, height, width) in [0, 1]; the result has the same shape and range. How much is drawn
depends on the number of images and nothing else, so the same generator gives the same augmentation anywhere.

recipe       what is done
none         nothing
flip         mirrored left-right, every second image
shift        padded with zeros and cropped at random: moved by at most an eighth of the side (digits cannot be mirrored)
crop-flip    shift and flip
weak         rotated by ≤ 10°, moved by ≤ 2 %, flip: FedMLP's view
jitter       crop-flip, then brightness, contrast and saturation changed by up to 40 %
strong       weak, then two RandAugment operations, each with probability ½, then a grey square: FixMatch's strong view
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from fedmll import registry
from fedmll.data.images import image_ops
from fedmll.registry import register

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""operation(images, strength, sign): strength from 0.1 to 0.9 and sign ±1 for each image."""

# FixMatch's pool with its ranges
POOL: dict[str, Operation] = {
    "identity": lambda images, strength, sign: images,
    "autocontrast": lambda images, strength, sign: image_ops.autocontrast(images),
    "equalize": lambda images, strength, sign: image_ops.equalize(images),
    "brightness": lambda images, strength, sign: image_ops.brightness(images, 0.05 + 0.9 * strength),
    "contrast": lambda images, strength, sign: image_ops.contrast(images, 0.05 + 0.9 * strength),
    "saturation": lambda images, strength, sign: image_ops.saturation(images, 0.05 + 0.9 * strength),
    "sharpness": lambda images, strength, sign: image_ops.sharpness(images, 0.05 + 0.9 * strength),
    "posterize": lambda images, strength, sign: image_ops.posterize(images, 4 + torch.floor(4 * strength)),
    "solarize": lambda images, strength, sign: image_ops.solarize(images, 1 - strength),
    "rotate": lambda images, strength, sign: image_ops.affine(images, degrees=30 * strength * sign),
    "shear-x": lambda images, strength, sign: image_ops.affine(images, shear_x=0.3 * strength * sign),
    "shear-y": lambda images, strength, sign: image_ops.affine(images, shear_y=0.3 * strength * sign),
    "shift-x": lambda images, strength, sign: image_ops.affine(images, right=0.3 * strength * sign),
    "shift-y": lambda images, strength, sign: image_ops.affine(images, down=0.3 * strength * sign),
}


def augment(images: Tensor, recipe: str, generator: Generator) -> Tensor:
    """The images as a recipe changes them; the input is not written to."""
    changed: Tensor = registry.find("augmentation", recipe)(images, generator)
    return changed


@register("augmentation", "none")
def unchanged(images: Tensor, generator: Generator) -> Tensor:
    return images


@register("augmentation", "flip")
def flip(images: Tensor, generator: Generator) -> Tensor:
    """Every image mirrored left-right with probability ½."""
    mirrored = _coins(len(images), generator).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


@register("augmentation", "shift")
def crop(images: Tensor, generator: Generator, padding: int | None = None) -> Tensor:
    """Padded with zeros on all sides (by an eighth of the height if not said) and cropped at random to the old size."""
    count, _, height, width = images.shape
    margin = max(1, height // 8) if padding is None else padding
    top, left = torch.randint(2 * margin + 1, (2, count), generator=generator, device=generator.device)
    windows = functional.pad(images, (margin, margin, margin, margin)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]


@register("augmentation", "weak")
def affine_flip(images: Tensor, generator: Generator, degrees: float = 10.0, shift: float = 0.02) -> Tensor:
    """Rotated by ≤ `degrees`, moved by ≤ `shift` of each side, mirrored with probability ½: one resampling."""
    turn, right, down = _between(-1, 1, (3, len(images)), generator).to(images.device)
    mirrored = _coins(len(images), generator)
    return image_ops.affine(images, turn * degrees, right * shift, down * shift, mirror=mirrored)


def colour_jitter(images: Tensor, generator: Generator, strength: float = 0.4) -> Tensor:
    """Brightness, contrast and saturation, in this order, each times a factor from 1 - strength to 1 + strength."""
    factors = _between(1 - strength, 1 + strength, (3, len(images)), generator)  # grey images draw all three too
    images = image_ops.brightness(images, factors[0])
    images = image_ops.contrast(images, factors[1])
    return image_ops.saturation(images, factors[2])


def cutout(images: Tensor, generator: Generator, side: int | None = None, value: float = 0.5) -> Tensor:
    """A grey square about a random pixel: 16 pixels a side, or half of a small image's; it may reach over the edge."""
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
    """Some operations of the POOL on every image, chosen anew for each, each done with `probability`."""
    shape, device = (operations, len(images)), generator.device
    chosen = torch.randint(len(POOL), shape, generator=generator, device=device)
    strength = torch.randint(1, 10, shape, generator=generator, device=device) / 10
    sign = torch.where(_between(0, 1, shape, generator) < 0.5, -1.0, 1.0)
    done = _between(0, 1, shape, generator) < probability
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


def _coins(count: int, generator: Generator) -> Tensor:
    return _between(0, 1, (count,), generator) < 0.5


def _between(low: float, high: float, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)
