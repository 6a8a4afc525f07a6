"""What every data source is asked, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable
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
        if not path.exists() and self.root is not None and (self.root / path).exists():
            return self.root / path
        return path


@dataclass(frozen=True)
class Source:
    """A kind of data (`register("source", NAME)(Source(…))`): one line of `fedmll data list`, and how it is loaded.

    file     what its argument is, for sources that are named with one (`packed:FILE.npz`)
    images   whether its samples are images, which can be composed
    says_clients   whether it may say which client a sample belongs to (`Dataset.groups`)
    """

    description: str
    load: Callable[[Request], Splits]
    available: Callable[[Path | None], bool]
    file: str = ""
    images: bool = True
    says_clients: bool = False


def data_missing(name: str, root: Path | None, layout: str, where_to_get: str) -> DataError:
    looked = f"in '{root}'" if root is not None else "because no folder was given (--root DIR)"
    return DataError(f"The data of '{name}' was not found {looked}. Expected: {layout}. {where_to_get}")
