"""Where data comes from. A source is a file here (or in a plug-in) that registers a Source.

`ml-NAME` is the pad-stack composite (fedmll.data.composite) of the single-label source NAME.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmll import registry
from fedmll.data.composite import CompositeOptions, compose
from fedmll.data.dataset import Splits
from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.decode import Size, height_and_width
from fedmll.data.sources.base import Request, Source
from fedmll.errors import ConfigError, DataError, nearest
from fedmll.settings import COMPOSITE, Reading

LARGEST_SIZE = 4_096


@dataclass(frozen=True)
class SourceDescription:
    name: str  # as it is written after --data
    description: str
    available: bool  # here and now, or with a file of the user's
    classes: int | None = None
    samples: int | None = None  # as published
    licence: str = ""


def load(
    name: str,
    root: Path | None = None,
    size: Size = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    reading: Reading | None = None,
    *,
    require_positives: bool = True,
) -> Splits:
    """The data called `name`, e.g. `digits`, `ml-cifar10`, `packed:FILE.npz`, `ml-packed:FILE.npz`, `folder:FILE.csv`.

    size      what images are resized to, one side or (height, width); of a composite: each source image, before it is
              placed
    seed      of a composite: which images are combined. A split that the source does not have is the same for all seeds
    options   layout, singles and pairs of a composite
    reading   how the user's own images and labels are read
    """
    kind, _, argument = name.removeprefix(COMPOSITE).partition(":")
    composed = name.startswith(COMPOSITE)
    source = _source(name, kind, argument)
    sides = height_and_width(size)
    if sides is not None and not all(1 <= side <= LARGEST_SIZE for side in sides):
        raise ConfigError(f"data.size must be from 1 to {LARGEST_SIZE} pixels; it is {size}.")
    reading = reading or Reading()
    _check_reading(name, kind, source, reading)
    composition = CompositeOptions(**options or {})
    if not composed and composition != CompositeOptions():
        raise ConfigError(
            f"data.layout, data.singles and data.pairs are for composites, and '{name}' is none. Leave them out, or "
            f"use '{COMPOSITE}{name}'."
        )
    if source.variants:
        argument = Path(argument).name  # where a folder of that name lies here, the experiment made it a path
    splits = source.load(Request(argument, root, sides, progress, require_positives, reading))
    if splits.train.is_images:
        _, height, width = splits.train.sample_shape
        splits = replace(splits, size=(height, width))
    return compose(splits, composition, seed, name, progress) if composed else splits


def describe_sources(root: Path | None = None) -> list[SourceDescription]:
    """Every source for `fedmll data list`; some are available only with the right folder as `root`."""
    lines = []
    for name, source in registry.all_of("source").items():
        available = source.available(root) or source.available(None)
        for written in source.names(name):
            argument = written.partition(":")[2]
            counts = source.published.get(argument)
            samples = sum(counts.values()) if counts else None
            classes = source.classes.get(argument) if isinstance(source.classes, Mapping) else source.classes
            facts = (available, classes, samples, source.licence)
            lines.append(SourceDescription(written, source.description, *facts))
            if source.images and source.composes:
                about = f"multi-label composites of {name}: one or two of its images on a canvas"
                lines.append(SourceDescription(COMPOSITE + written, about, available))
    return lines


def _check_reading(name: str, kind: str, source: Source, reading: Reading) -> None:
    """What would mean nothing is refused; a plug-in's source sees to that itself."""
    if kind in registry.added("source"):
        return
    for setting in ("classes", "ignore", "group", "window", "doubtful"):
        value = getattr(reading, setting)
        if not value or setting in source.settings or (setting == "group" and value == source.group):
            continue
        known = registry.all_of("source").items()
        able = [named for other, entry in known if setting in entry.settings for named in entry.names(other)]
        raise ConfigError(f"data.{setting} is for {' and '.join(able)}, and data.name is '{name}'. Leave it out.")


def _source(name: str, kind: str, argument: str) -> Source:
    sources: dict[str, Source] = registry.all_of("source")
    source = sources.get(kind)
    if source is None:
        known = [
            *sources,
            *(COMPOSITE + plain for plain, entry in sources.items() if entry.composes and not entry.file),
        ]
        raise DataError(f"There is no data source called '{name}'{nearest(name, known)}")
    written = name.partition(":")[0]
    if source.file and not argument:
        raise DataError(f"'{kind}' needs a file: write {written}:{source.file}.")
    if source.variants and Path(argument).name not in source.variants:
        raise DataError(f"'{name}' is not known; write {' or '.join(source.names(written))}.")
    if name.startswith(COMPOSITE) and not source.images:
        raise DataError(
            f"'{name}': composites are made of images, and '{kind}' has none. Use it without '{COMPOSITE}'."
        )
    if name.startswith(COMPOSITE) and not source.composes:
        raise DataError(
            f"'{name}': composites are made of images with one label each, and those of '{kind}' have several. Use it "
            f"without '{COMPOSITE}'."
        )
    if argument and not source.file and not source.variants:
        raise DataError(f"'{kind}' takes no file; write '{written}' and give its folder with --root.")
    return source
