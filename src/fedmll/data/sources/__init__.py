"""Data sources: one module per dataset or file format; each registers a `Source`. Start with `load` here.

- `base` — `Source` and `SourceRequest`
- `folder`, `packed`, `features`, `table`, `hf` — the user's own data
- `labelled_images` — shared by all sources that read image files
- `npz` — reads `.npz` files that may be damaged or malicious
- all others — published datasets in their official layout

`ml-NAME` is the composite (`fedmll.data.composite`) of the single-label source NAME.
"""

from __future__ import annotations

import csv
import io
import tarfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmll.config.settings import COMPOSITE, ReadingOptions
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError, FedmllError
from fedmll.core.files import write_atomic
from fedmll.core.text import suggest
from fedmll.data.composite import CompositeOptions, compose
from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset, Splits
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import Size, height_and_width
from fedmll.data.sources.base import DownloadableFile, Source, SourceRequest
from fedmll.data.targets import check_classes

LARGEST_SIZE = 4_096


@dataclass(frozen=True)
class SourceDescription:
    name: str  # as written after --data
    description: str
    available: bool  # with this root, or with a file of the user
    classes: int | None = None
    samples: int | None = None  # as published
    licence: str = ""


@dataclass(frozen=True)
class SampleCount:
    part: str  # train, validation, test; "train and test" if the publisher has no split
    found: int
    published: int | None  # None: not published

    @property
    def agrees(self) -> bool:
        return self.published in (None, self.found)


def load(
    name: str,
    root: Path | None = None,
    size: Size = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
    reading: ReadingOptions | None = None,
    *,
    require_positives: bool = True,
    labels_only: bool = False,
) -> Splits:
    """Load data by name.

    Args:
        name: for example `digits`, `ml-cifar10`, `packed:FILE.npz`, `ml-packed:FILE.npz` or `folder:FILE.csv`.
        root: the folder (or file) of the data.
        size: the size to resize images to, one side or (height, width); of a composite: of each source image.
        seed: decides which images a composite combines. A drawn split is the same for all seeds.
        options: layout, singles and pairs of a composite.
        progress: called with the number of prepared images.
        reading: how the user's images and labels are read.
        require_positives: reject training data in which a class is never present.
        labels_only: do not open the images of published datasets.
    """
    source, argument = _find_source(name)
    _check_name(name, source, argument)
    composed = name.startswith(COMPOSITE)
    sides = height_and_width(size)
    if sides is not None and not all(1 <= side <= LARGEST_SIZE for side in sides):
        raise ConfigError(f"data.size must be from 1 to {LARGEST_SIZE} pixels; it is {size}.")
    reading = reading or ReadingOptions()
    _check_reading_options(name, source, reading)
    composition = CompositeOptions(**options or {})
    if not composed and composition != CompositeOptions():
        raise ConfigError(
            f"data.layout, data.singles and data.pairs are for composites, and '{name}' is not one. Leave them out, or "
            f"use '{COMPOSITE}{name}'."
        )
    request = SourceRequest(
        argument=argument,
        root=root,
        size=sides,
        progress=progress,
        require_positives=require_positives,
        reading=reading,
        labels_only=labels_only,
    )
    is_added = source in registry.find_added("source").values()
    splits = _load_added(name, source, request) if is_added else source.load(request)
    if splits.train.is_images:
        _, height, width = splits.train.sample_shape
        splits = replace(splits, size=(height, width))
    return compose(splits, composition, seed, name, progress) if composed else splits


def _load_added(name: str, source: Source, request: SourceRequest) -> Splits:
    """Load data by a plug-in's source, and check what it returns before anything is done with it."""
    where = f"The data source '{name}'"
    try:
        splits = source.load(request)
    except FedmllError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"in {Path(last.filename).name}, line {last.lineno}"
        if last.filename == __file__:  # the call itself failed
            place = "because its function load must take one argument, the SourceRequest"
        raise DataError(f"{where} failed {place}: {type(error).__name__}: {error}") from error
    if not isinstance(splits, Splits):
        raise DataError(f"{where} must return Splits(train, test); its function load returned {_kind(splits)}.")
    parts = {"train": splits.train, "test": splits.test, "validation": splits.validation}
    for part, data in parts.items():
        if data is None and part == "validation":
            continue
        if not isinstance(data, Dataset):
            raise DataError(f"{where}: Splits.{part} must be a Dataset; it is {_kind(data)}.")
        if not len(data):
            raise DataError(f"{where}: Splits.{part} has no samples.")
        if data.classes != splits.train.classes or data.sample_shape != splits.train.sample_shape:
            raise DataError(
                f"{where}: Splits.{part} must have the classes and the sample shape of Splits.train; it has "
                f"{len(data.classes)} classes and {data.sample_shape}, and train has {len(splits.train.classes)} and "
                f"{splits.train.sample_shape}."
            )
        if data.labels.min() < UNKNOWN or data.labels.max() > PRESENT:
            raise DataError(f"{where}: the labels of Splits.{part} must be 1 (present), 0 (absent) or -1 (unknown).")
        if data.rows.min() < 0 or data.rows.max() >= len(data.store):
            raise DataError(f"{where}: the rows of Splits.{part} must be positions in its {len(data.store)} samples.")
    check_classes(splits.train.classes, where)
    if splits.train.is_images != source.images:
        found = "images" if splits.train.is_images else "feature vectors"
        raise DataError(
            f"{where} returned {found} {splits.train.sample_shape}; say so with images={splits.train.is_images} in its "
            "Source."
        )
    return splits


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def write_labels(name: str, root: Path, out: Path, reading: ReadingOptions | None = None) -> Splits:
    """Write the labels of a published image dataset as a CSV of a folder: for `folder:FILE.csv` and for a site of a
    real federation. No image is opened; the paths are relative to `root`."""
    splits = load(name, root, reading=reading, require_positives=False, labels_only=True)
    train = splits.train
    if train.files is None or not train.is_images:
        raise ConfigError(f"'{name}' has no image files with labels, so there is nothing to write.")
    group = [] if splits.group is None else [splits.group]
    header = ["image", "split", *group, *train.classes]
    check_classes(tuple(header), f"The labels of '{name}'")
    lines = []
    for part, data in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
        if data is None:
            continue
        assert data.files is not None
        patients = [[]] * len(data) if not group or data.patients is None else [[name] for name in data.patients]
        for file, patient, targets in zip(data.files[data.rows], patients, data.labels.tolist(), strict=True):
            lines.append([file, part, *patient, *("" if target == UNKNOWN else target for target in targets)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    write_atomic(out, text.getvalue())
    return splits


def describe_sources(root: Path | None = None) -> list[SourceDescription]:
    """Describe all sources for `fedmll data list`; some are available only with the right `root`."""
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


def compare_counts(name: str, splits: Splits) -> list[SampleCount]:
    """The number of samples of each part, found and published."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    found = {part: len(data) for part, data in parts.items() if data is not None}
    source, argument = _find_source(name)
    published = {} if name.startswith(COMPOSITE) else source.published.get(argument, {})
    if "train and test" in published:
        found = {"train and test": sum(found.values())}
    return [SampleCount(part, found.get(part, 0), published.get(part)) for part in dict.fromkeys([*found, *published])]


def find_downloads(name: str) -> tuple[DownloadableFile, ...]:
    """The freely available files of a dataset."""
    source, argument = _find_source(name)
    if argument in source.downloads:
        return source.downloads[argument]
    sources = registry.all_of("source").items()
    known = [other + (f":{variant}" if variant else "") for other, entry in sources for variant in entry.downloads]
    what = f"'{name}' cannot be downloaded by this command"
    if source.licence:
        what += f" ({source.licence}); `fedmll data check {name}` says where to get it"
    raise DataError(f"{what}. These can: {', '.join(known)}.")


def unpack(archive: Path, folder: Path) -> bool:
    """Unpack a tar file into a folder; returns False if it is not a tar file. Nothing is written outside the folder."""
    if ".tar" not in archive.name:
        return False
    try:
        with tarfile.open(archive) as contents:
            contents.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"'{archive}' cannot be unpacked into '{folder}' ({error}).") from None
    return True


def _find_source(name: str) -> tuple[Source, str]:
    """The source with this name, and its argument. An existing folder named like a variant became an absolute path."""
    kind, _, argument = name.removeprefix(COMPOSITE).partition(":")
    sources: dict[str, Source] = registry.all_of("source")
    if kind.startswith(registry.OBJECT_PREFIX):
        return registry.find("source", kind), argument
    if kind not in sources:
        composites = (COMPOSITE + other for other, source in sources.items() if source.composes and not source.file)
        raise DataError(f"There is no data source called '{name}'{suggest(name, [*sources, *composites])}")
    return sources[kind], Path(argument).name if sources[kind].variants else argument


def _check_reading_options(name: str, source: Source, reading: ReadingOptions) -> None:
    """Reject settings that the source does not use. Sources of plug-ins check their settings themselves."""
    if source in registry.find_added("source").values():
        return
    for setting in ("classes", "ignore", "group", "window", "uncertain_labels"):
        value = getattr(reading, setting)
        if not value or setting in source.settings or (setting == "group" and value == source.group):
            continue
        known = registry.all_of("source").items()
        able = [named for other, entry in known if setting in entry.settings for named in entry.names(other)]
        raise ConfigError(f"data.{setting} is for {' and '.join(able)}, but data.name is '{name}'. Leave it out.")


def _check_name(name: str, source: Source, argument: str) -> None:
    kind, written = name.removeprefix(COMPOSITE).partition(":")[0], name.partition(":")[0]
    if source.file and not argument:
        raise DataError(f"'{kind}' needs a file: write {written}:{source.file}.")
    if source.variants and argument not in source.variants:
        raise DataError(f"'{name}' is not known; write {' or '.join(source.names(written))}.")
    if argument and not source.file and not source.variants:
        raise DataError(f"'{kind}' takes no file; write '{written}' and give its folder with --root.")
    if name.startswith(COMPOSITE) and not source.images:
        raise DataError(
            f"'{name}': composites are made of images, and '{kind}' has none. Use it without '{COMPOSITE}'."
        )
    if name.startswith(COMPOSITE) and not source.composes:
        raise DataError(
            f"'{name}': composites are made of images with one label each, and those of '{kind}' have several. Use it "
            f"without '{COMPOSITE}'."
        )
