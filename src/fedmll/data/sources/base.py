"""What every data source is asked, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmll.data.dataset import Splits
from fedmll.data.images.cache import Progress, silent
from fedmll.errors import DataError
from fedmll.settings import Reading


@dataclass(frozen=True)
class Request:
    """Which data, and how.

    argument            what follows the colon of the name, as in `packed:FILE.npz`; empty without one
    root                the folder (or file) of the data, `--root`
    size                height and width that images are resized to; None keeps or chooses them
    reading             how the user's own images and labels are read
    require_positives   refuse training data in which a class is never present. One site of a federation need not
                        have every class; the data of a whole experiment must
    """

    argument: str = ""
    root: Path | None = None
    size: tuple[int, int] | None = None
    progress: Progress = silent
    require_positives: bool = True
    reading: Reading = field(default_factory=Reading)

    def file(self) -> Path:
        """The file that the argument names: from the current folder, else from the root."""
        path = Path(self.argument).expanduser()
        return path if self.root is None or path.exists() else self.root / path


@dataclass(frozen=True)
class Download:
    """A file that its publisher gives to everybody: `digest` is `md5:…` or the beginning of a sha256, as published."""

    url: str
    digest: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True)
class Source:
    """A kind of data (`register("source", NAME)(Source(…))`): one line of `fedmll data list`, and how it is loaded.

    file          what its argument is, for sources that are named with one (`packed:FILE.npz`)
    variants      what may follow the colon, for sources that have several (`voc:2007`); "" is none
    images        whether its samples are images
    composes      whether they have one label each, so that `ml-NAME` can be made of them
    says_clients  whether it may say which client a sample belongs to (`Dataset.groups`)
    group         whose samples stay on one side of every split, by the publisher's name for it ("Patient ID")
    settings      the settings of `settings.Reading` that mean something here
    classes       how many there are; where variants differ in it, by argument
    licence       for `fedmll data list`
    published     by argument: how many samples each split has, as its publisher says
    downloads     by argument: the files that `fedmll data get` fetches
    """

    description: str
    load: Callable[[Request], Splits]
    available: Callable[[Path | None], bool]
    file: str = ""
    images: bool = True
    says_clients: bool = False
    variants: tuple[str, ...] = ()
    composes: bool = True
    group: str = ""
    settings: tuple[str, ...] = ()
    classes: int | Mapping[str, int] | None = None
    licence: str = ""
    published: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    downloads: Mapping[str, tuple[Download, ...]] = field(default_factory=dict)

    def names(self, name: str) -> list[str]:
        """As it is written after --data."""
        if self.variants:
            return [name + (f":{variant}" if variant else "") for variant in self.variants]
        return [f"{name}:{self.file}" if self.file else name]


def data_missing(name: str, root: Path | None, layout: str, where_to_get: str) -> DataError:
    looked = f"in '{root}'" if root is not None else "because no folder was given (--root DIR)"
    return DataError(f"The data of '{name}' was not found {looked}. Expected: {layout}. {where_to_get}")
