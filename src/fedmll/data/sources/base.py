"""`Source`: what a data source declares about itself; `SourceRequest`: the argument of its `load` function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.dataset import Splits
from fedmll.data.images.cache import Progress, no_progress


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """Which data to load, and how.

    Attributes:
        argument: the text after the colon of the name, as in `packed:FILE.npz`; empty without a colon.
        root: the folder (or file) of the data, `--root`.
        size: height and width to resize images to; None: from the data.
        progress: called with the number of prepared images.
        require_positives: reject training data in which a class is never present. A site of a real federation need not
            have all classes; the data of a whole experiment must.
        reading: how the user's images and labels are read.
        labels_only: the labels and the files are wanted, not the images: published image datasets then open none.
    """

    argument: str = ""
    root: Path | None = None
    size: tuple[int, int] | None = None
    progress: Progress = no_progress
    require_positives: bool = True
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    labels_only: bool = False

    def file(self) -> Path:
        """The file that the argument names, relative to the current folder or to the root."""
        path = Path(self.argument).expanduser()
        return path if self.root is None or path.exists() else self.root / path


@dataclass(frozen=True)
class DownloadableFile:
    """A freely available file; `digest` is the beginning of its published SHA-256, or `md5:…`."""

    url: str
    digest: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data source (`register("source", NAME)(Source(…))`), listed by `fedmll data list`.

    Attributes:
        description: one line for `fedmll data list`.
        load: returns the data.
        available: whether the data can be loaded with this `root`.
        file: the kind of argument, for sources that need a file (`packed:FILE.npz`).
        images: whether the samples are images.
        has_clients: whether the source may know which client a sample belongs to (`Dataset.groups`).
        variants: possible arguments, for sources with several variants (`voc:2007`); "" is no argument.
        composes: whether each image has one label, so that `ml-NAME` can be made of them.
        group: the column whose samples stay on one side of each split, with the publisher's name ("Patient ID").
        nothing: the publisher's label of a sample that has none of the classes, if it is not a class ("No Finding").
        settings: the settings of `ReadingOptions` that this source uses.
        classes: the number of classes, or a mapping from variant to number.
        licence: for `fedmll data list`.
        published: argument → the published number of samples per split.
        downloads: argument → the files that `fedmll data get` downloads.
    """

    description: str
    load: Callable[[SourceRequest], Splits]
    available: Callable[[Path | None], bool] = lambda root: True
    file: str = ""
    images: bool = True
    has_clients: bool = False
    variants: tuple[str, ...] = ()
    composes: bool = True
    group: str = ""
    nothing: str = ""
    settings: tuple[str, ...] = ()
    classes: int | Mapping[str, int] | None = None
    licence: str = ""
    published: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    downloads: Mapping[str, tuple[DownloadableFile, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("load", "available"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"{name} of a Source must be a function; it is {getattr(self, name)!r}.")

    def names(self, name: str) -> list[str]:
        """The names of the source's variants, as written after --data."""
        if self.variants:
            return [name + (f":{variant}" if variant else "") for variant in self.variants]
        return [f"{name}:{self.file}" if self.file else name]


def data_missing(name: str, root: Path | None, layout: str, where_to_get: str) -> DataError:
    looked = f"in '{root}'" if root is not None else "because no folder was given (--root DIR)"
    return DataError(f"The data of '{name}' was not found {looked}. Expected: {layout}. {where_to_get}")
