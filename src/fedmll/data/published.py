"""What a publisher says of a dataset beside what is there, and the files that it gives to everybody."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from fedmll import registry
from fedmll.data.dataset import Splits
from fedmll.data.sources.base import Download, Source
from fedmll.errors import ConfigError, DataError, nearest
from fedmll.settings import COMPOSITE


@dataclass(frozen=True)
class Count:
    part: str  # train, validation, test; "train and test" where the publisher has no split
    found: int
    published: int | None  # None: nothing is published

    @property
    def agrees(self) -> bool:
        return self.published in (None, self.found)


def counts(name: str, splits: Splits) -> list[Count]:
    """How many samples every part has, and how many it should have."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    found = {part: len(data) for part, data in parts.items() if data is not None}
    source, argument = _found(name)
    published = {} if name.startswith(COMPOSITE) else source.published.get(argument, {})
    if "train and test" in published:
        found = {"train and test": sum(found.values())}
    return [Count(part, found.get(part, 0), published.get(part)) for part in dict.fromkeys([*found, *published])]


def downloads(name: str) -> tuple[Download, ...]:
    """The files of a dataset that may be downloaded freely."""
    source, argument = _found(name)
    if argument in source.downloads:
        return source.downloads[argument]
    known = [
        other + (f":{variant}" if variant else "")
        for other, entry in registry.all_of("source").items()
        for variant in entry.downloads
    ]
    what = f"'{name}' cannot be downloaded by this command"
    if source.licence:
        what += f" ({source.licence}); `fedmll data check {name}` says where it is to be had"
    raise DataError(f"{what}. Those that can: {', '.join(known)}.")


def unpack(archive: Path, folder: Path) -> bool:
    """The contents of a tar file, put into a folder; whether it is one. Nothing is written outside of the folder."""
    if ".tar" not in archive.name:
        return False
    try:
        with tarfile.open(archive) as contents:
            contents.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"'{archive}' cannot be unpacked into '{folder}' ({error}).") from None
    return True


def _found(name: str) -> tuple[Source, str]:
    kind, _, argument = name.removeprefix(COMPOSITE).partition(":")
    sources: dict[str, Source] = registry.all_of("source")
    if kind not in sources:
        raise ConfigError(f"There is no data source called '{name}'{nearest(kind, sources)}")
    source = sources[kind]
    return source, Path(argument).name if source.variants else argument
