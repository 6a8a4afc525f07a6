"""Backbones: images → a map of tokens (batch, width, rows, columns). Feature vectors give a map of one token."""

from fedmll.models.backbones.base import Backbone, build_backbone, pixel_scale

__all__ = ["Backbone", "build_backbone", "pixel_scale"]
