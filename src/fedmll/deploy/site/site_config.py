"""What a site's operator configures: where the data is, what the site agrees to, and `site.json`, the file with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.config.settings import ReadingOptions
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.deploy.site.approval import delete_setup_record

SERVER_CERTIFICATE = "server.crt"  # next to the site file: the certificate that the server has shown


@dataclass(frozen=True, kw_only=True)
class SiteLimits:
    """Limits that hold at a site whatever a server asks for."""

    max_rounds: int = 1000  # the largest number of rounds
    max_epochs: int = 100  # the largest number of epochs in a round
    max_hours: float = 720.0  # of training and testing in one join
    # the smallest number of training images: a model trained on few images reveals much about each
    min_images: int = 10
    max_memory: float = 4.0  # GB for the model and one batch
    methods: tuple[str, ...] = ()  # the only allowed methods; empty: all
    min_count: int = 10  # counts of fewer positive or negative images of a class stay at the site

    def __post_init__(self) -> None:
        counts = (self.max_rounds, self.max_epochs, self.min_images, self.min_count)
        if min(counts) < 1 or not self.max_memory > 0 or not self.max_hours > 0:
            raise ConfigError(
                "--max-rounds, --max-epochs, --min-images and --min-count must be at least 1, and --max-memory and "
                "--max-hours must be more than 0."
            )

    def check_settings(self, experiment: Experiment) -> None:
        """Raise a SiteError if the experiment's method or its number of rounds or epochs is not allowed."""
        name, rounds, epochs = experiment.method.name, experiment.training.rounds, experiment.training.local_epochs
        if self.methods and name not in self.methods:
            allowed = ", ".join(self.methods)
            raise SiteError(SiteErrorCode.LIMITS, f"The method is '{name}', and you allow {allowed} (--methods).")
        if rounds > self.max_rounds:
            raise SiteError(
                SiteErrorCode.LIMITS, f"The study has {rounds} rounds, and you allow {self.max_rounds} (--max-rounds)."
            )
        if epochs > self.max_epochs:
            text = f"The study trains {epochs} epochs per round, and you allow {self.max_epochs} (--max-epochs)."
            raise SiteError(SiteErrorCode.LIMITS, text)

    def check_image_count(self, training: int) -> None:
        """Raise a SiteError if there are too few training images."""
        if training < self.min_images:
            raise SiteError(
                SiteErrorCode.LIMITS,
                f"{training} images would be left to train on (the others are held out for tests), and you require at "
                f"least {self.min_images} (--min-images).",
            )


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's data, folders and limits."""

    name: str  # the site's name in the federation
    csv: Path  # the labels file
    images: Path  # the folder that the paths in the labels file start from
    state_dir: Path  # the site's own folder (see site_folder.py)
    # how the labels and images are read
    reading: ReadingOptions = field(default_factory=lambda: ReadingOptions(by_options=True))
    device: str = "auto"  # cpu, cuda or auto
    local_files: tuple[Path, ...] = ()  # the site's copies of files that an experiment names by their digest
    limits: SiteLimits = field(default_factory=SiteLimits)  # what the site does not do
    # a person approves every study at the terminal; False: a simulation with sites of one's own
    needs_approval: bool = False
    keep_cache: bool = False  # keep the prepared images in `state_dir` when the run is over
    class_renames: tuple[tuple[str, str], ...] = ()  # pairs (the site's name of a class, the study's name)
    out: Path | None = None  # where the model and its report go; None: `state_dir`
    validation_only: bool = False  # the site tests the model and never trains
    # the digest of the only study that the site takes part in. Then nobody is asked.
    approved_digest: str | None = None

    @property
    def output_dir(self) -> Path:
        return self.out or self.state_dir


def write_site_file(site: Site, path: Path) -> None:
    """Write the site to a JSON file, from which Flower's runtimes take it. A new join starts: no setup is answered."""
    delete_setup_record(path)
    files.write_atomic(path, json.dumps(asdict(site), default=str))


def read_site_file(path: Path) -> Site:
    values = json.loads(path.read_text())
    reading: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values["reading"].items()
    }
    values["reading"] = ReadingOptions(**reading)
    values |= {name: Path(values[name]) for name in ("csv", "images", "state_dir")}
    values["out"] = None if values["out"] is None else Path(values["out"])
    values["local_files"] = tuple(map(Path, values["local_files"]))
    values["class_renames"] = tuple((own, study) for own, study in values["class_renames"])
    values["limits"] = SiteLimits(**values["limits"] | {"methods": tuple(values["limits"]["methods"])})
    return Site(**values)
