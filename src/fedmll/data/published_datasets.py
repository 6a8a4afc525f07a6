"""Published facts about datasets: expected numbers of samples, and files that can be downloaded freely."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from fedmll.config.settings import COMPOSITE
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.text import suggest
from fedmll.data.dataset import Splits
from fedmll.data.sources.base import DownloadableFile, Source


@dataclass(frozen=True)
class SampleCount:
    part: str  # train, validation, test; "train and test" if the publisher has no split
    found: int
    published: int | None  # None: not published

    @property
    def agrees(self) -> bool:
        return self.published in (None, self.found)


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
    known = [
        other + (f":{variant}" if variant else "")
        for other, entry in registry.all_of("source").items()
        for variant in entry.downloads
    ]
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
    kind, _, argument = name.removeprefix(COMPOSITE).partition(":")
    sources: dict[str, Source] = registry.all_of("source")
    if kind not in sources:
        raise ConfigError(f"There is no data source called '{name}'{suggest(kind, sources)}")
    source = sources[kind]
    return source, Path(argument).name if source.variants else argument
