"""`fedmll check`: whether a site can join, found out before it does. Everything is said at once: labels, class names,
images, patients, disk, keys, the server, the clock. Nothing leaves the site but a greeting to the server's port."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

from fedmll import files
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.labels_csv import PATIENT_COLUMNS, LabelTable
from fedmll.data.images.reading import some
from fedmll.deploy import certificates, joining
from fedmll.deploy.private import UnsupportedAlgorithm, private_key
from fedmll.deploy.site import Site, Summary, check, labels_of, strangers
from fedmll.errors import FedmllError
from fedmll.experiment import Experiment

SPARE_BYTES = 200_000_000  # beside the prepared images: models, memory, logs
PACKAGES = ("fedmll", "flwr", "torch")
Level = Literal["good", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    text: str


@dataclass(frozen=True)
class Checked:
    findings: list[Finding]
    summary: Summary | None  # None: the data cannot be used as it is

    @property
    def errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    def of(self, level: Level) -> list[str]:
        return [finding.text for finding in self.findings if finding.level == level]

    def write(self, file: Path) -> None:
        """For who looks after the machine: no patient, image or label is in it beyond what is wrong with them."""
        found = {"errors": self.errors, "findings": [asdict(finding) for finding in self.findings]}
        files.write(file, json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def check_site(
    site: Site,
    study: Experiment | None = None,
    access: joining.Access | None = None,
    progress: Progress = silent,
    reach: bool = True,
) -> Checked:
    """`study`: the experiment as its operator sent it. `access`: the server to be reached, with which keys; it is not
    tried with `reach` off: `join` waits for a server that is not there yet."""
    findings, summary = [_versions()], None
    try:
        summary = check(site, progress)
        findings.append(Finding("data", "good", f"{summary.images} images, all readable, with labels"))
        findings += [Finding("data", "warning", note) for note in summary.notes]
    except FedmllError as error:
        findings.append(Finding("data", "error", str(error)))
    try:
        table = labels_of(site)
    except FedmllError as error:
        if not any(finding.text == str(error) for finding in findings):
            findings.append(Finding("data", "error", str(error)))
    else:
        findings += [*_columns(table), *_copies(table), *_patients(site, table)]
        if study is not None and study.sites is not None:
            findings += _names(table, study.sites.classes)
        findings.append(_disk(site, len(table.paths), study))
    if access is not None:
        findings += _keys(access)
        if reach and (access.ca is None or access.ca.is_file()):
            findings += _server(access)
    return Checked(findings, summary)


def _names(table: LabelTable, classes: Sequence[str]) -> list[Finding]:
    lacking = [name for name in classes if name not in table.classes]
    advice = "Rename it in a file for --rename, or leave the column out with --ignore."
    found = [
        Finding("classes", "error", f"'{name}' is no class of the study{meant} {advice}")
        for name, meant in strangers(table.classes, classes)
    ]
    if lacking:
        found.append(Finding("classes", "warning", f"not annotated here, so unknown: {', '.join(lacking)}"))
    return found or [Finding("classes", "good", f"the study's {len(classes)} classes, all of them")]


def _columns(table: LabelTable) -> list[Finding]:
    found, seen = [], dict[bytes, str]()
    for name, column in zip(table.classes, table.labels.T, strict=True):
        values = set(np.unique(column).tolist())
        if values == {UNKNOWN}:
            found.append(Finding("labels", "warning", f"'{name}' is blank everywhere: nothing is known of it"))
        elif values == {PRESENT, UNKNOWN}:
            text = f"'{name}' has ones and blanks and not a single 0. Blank means unknown; write 0 where it is absent"
            found.append(Finding("labels", "error", text))
        elif PRESENT not in values or ABSENT not in values:
            word = "absent" if PRESENT not in values else "present"
            found.append(Finding("labels", "warning", f"'{name}' is {word} wherever it is known: it teaches little"))
        else:
            twin = seen.setdefault(column.tobytes(), name)
            if twin != name:
                found.append(Finding("labels", "warning", f"'{name}' and '{twin}' have the same labels in every row"))
    return found


def _copies(table: LabelTable) -> list[Finding]:
    """The same file twice, by its bytes."""
    first: dict[bytes, int] = {}
    within: list[str] = []
    across: list[str] = []
    for row, path in enumerate(table.paths):
        try:
            with path.open("rb") as file:
                place = first.setdefault(hashlib.file_digest(file, "blake2b").digest(), row)
        except OSError:
            continue  # named among the unreadable ones
        if place != row:
            other = table.split is not None and table.split[place] != table.split[row]
            (across if other else within).append(f"'{table.names[row]}' is '{table.names[place]}'")
    found = []
    if across:
        text = f"{len(across)} images are also on the other side of the split: {some(across)}. Keep one of each"
        found.append(Finding("images", "error", text))
    if within:
        text = f"{len(within)} images are there twice: {some(within)}"
        if table.split is None:
            text += ". Copies may come to both sides of the split that is drawn; keep one of each"
        found.append(Finding("images", "warning", text))
    return found


def _patients(site: Site, table: LabelTable) -> list[Finding]:
    """That nobody is on both sides is checked with the data where a column says whose an image is."""
    if table.patients is not None:
        text = f"{len(set(table.patients.tolist()))} by '{site.group}', each on one side of every split"
        return [Finding("patients", "good", text)]
    likely = [name for name in site.ignore if name.lower() in PATIENT_COLUMNS]
    if likely:
        text = f"'{likely[0]}' is left out. With --group {likely[0]} nobody's images are on both sides of a split"
        return [Finding("patients", "warning", text)]
    return []


def _disk(site: Site, images: int, study: Experiment | None) -> Finding:
    """For the prepared images, by the study's size, or 224 pixels where it is not known."""
    size = None if study is None else study.data.size
    height, width = (224, 224) if size is None else (size, size) if isinstance(size, int) else size
    channels = 3 if study is None or study.sites is None else study.sites.channels
    needed = images * channels * height * width + SPARE_BYTES
    there = next(folder for folder in (site.memory, *site.memory.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    shown = f"{free / 1e9:.1f} GB free for {site.memory}, about {needed / 1e9:.1f} GB needed"
    return Finding("disk", "good" if free > needed else "error", shown)


def _keys(access: joining.Access) -> list[Finding]:
    found = []
    for path, what in ((access.ca, "--ca"), (access.key, "--key")):
        if path is not None and not path.is_file():
            found.append(Finding("keys", "error", f"{path} does not exist ({what}); `fedmll keys` says who makes it"))
    if access.key is not None and access.key.is_file():
        if stat.S_IMODE(access.key.stat().st_mode) & 0o077:
            text = f"{access.key} can be read by others: chmod 600"
            found.append(Finding("keys", "warning", text))
        try:
            private_key(access.key.read_bytes(), access.passphrase)
        except (ValueError, UnsupportedAlgorithm, OSError):
            found.append(Finding("keys", "error", f"{access.key} is not a key made by `fedmll keys new`"))
    if access.ca is not None and access.ca.is_file():
        try:
            left = (certificates.dates(access.ca)[1] - datetime.datetime.now(datetime.UTC)).days
        except FedmllError as error:
            return [*found, Finding("keys", "error", str(error))]
        level: Level = "error" if left <= 0 else "warning" if left < certificates.SOON_DAYS else "good"
        found.append(Finding("keys", level, f"{access.ca.name} ends in {left} days"))
    return found


def _server(access: joining.Access) -> list[Finding]:
    """Whether it is there and is who it should be, and what time it has."""
    try:
        joining.look(access, lambda text: None)
    except FedmllError as error:
        return [Finding("server", "error", str(error))]
    said = f"{access.server} answers" + ("" if access.ca is None else ", with a certificate of your CA")
    found, off = [Finding("server", "good", said)], joining.seconds_ahead(access)
    if off is not None:
        level: Level = "good" if abs(off) <= joining.CLOCK_SECONDS else "error"
        found.append(Finding("clock", level, joining.clock_words(off)))
    return found


def _versions() -> Finding:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            if name == "flwr":
                return Finding("version", "error", "Flower is not installed: pip install 'fedmll[flower]'")
            found.append(f"{name} from source")
    return Finding("version", "good", ", ".join(found))
