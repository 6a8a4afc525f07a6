"""`fedmll check`: can this site join? All problems are reported at once, before the site joins.

The check covers labels, class names, images, patients, disk, keys, the server and the clock. Nothing leaves the site
except a connection to the server's port.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedmll.config.experiment import Experiment
from fedmll.config.settings import NO_DATA
from fedmll.core import files
from fedmll.core.errors import FedmllError
from fedmll.core.versions import package_version
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.labels_csv import PATIENT_COLUMNS, LabelTable
from fedmll.data.images.problems import abbreviate
from fedmll.deploy.security import certificates
from fedmll.deploy.security.private_keys import UnsupportedAlgorithm, check_private_file, load_private_key
from fedmll.deploy.site import server_access
from fedmll.deploy.site.server_access import ServerAccess
from fedmll.deploy.site.site_config import Site
from fedmll.deploy.site.site_data import SiteDataSummary, check_site_data, find_unknown_classes, read_site_labels

SPARE_BYTES = 200_000_000  # in addition to the prepared images: models, client state, logs
DEFAULT_SIZE = 224  # pixels, if the study is not known
PACKAGES = ("fedmll", "flwr", "torch")
Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class CheckResult:
    topic: str
    level: Level
    text: str


@dataclass(frozen=True)
class SiteCheck:
    """All results; `summary` is None if the data cannot be used as it is."""

    results: list[CheckResult]
    summary: SiteDataSummary | None

    @property
    def errors(self) -> int:
        return sum(result.level == "error" for result in self.results)

    def texts(self, level: Level) -> list[str]:
        return [result.text for result in self.results if result.level == level]

    def write(self, file: Path) -> None:
        """Write the results as JSON, for example for an administrator.

        The file names patients, images and labels only where something is wrong with them.
        """
        values = {"errors": self.errors, "results": [asdict(result) for result in self.results]}
        files.write_atomic(file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def check_site(
    site: Site,
    study: Experiment | None = None,
    access: ServerAccess | None = None,
    progress: Progress = no_progress,
    connect: bool = True,
    clients: int | None = None,
) -> SiteCheck:
    """Check everything that could keep a site from joining.

    Args:
        site: the site.
        study: the experiment, as the server's operator sent it.
        access: the server and the keys to check.
        progress: called with the progress of reading images.
        connect: connect to the server. `join` does not: it waits for a server that has not started yet.
        clients: the number of clients of the study; the study's digest depends on it.
    """
    results, summary = [_check_versions()], None
    try:
        summary = check_site_data(site, progress)
        results.append(CheckResult("data", "ok", f"{summary.images} images, all readable, with labels"))
        results += [CheckResult("data", "warning", note) for note in summary.notes]
    except FedmllError as error:
        results.append(CheckResult("data", "error", str(error)))
    try:
        table = read_site_labels(site)
    except FedmllError as error:
        if not any(result.text == str(error) for result in results):
            results.append(CheckResult("data", "error", str(error)))
    else:
        results += [*_check_columns(table), *_check_copies(table), *_check_patients(site, table)]
        if study is not None and study.study is not None and study.study.classes:
            results += _check_class_names(table, study.study.classes)
        results.append(_check_disk(site, len(table.paths), study))
    if study is not None:
        results.append(_show_digest(study, clients))
    if access is not None:
        results += _check_keys(access)
        if connect and (access.ca is None or access.ca.is_file()):
            results += _check_server(access)
    return SiteCheck(results, summary)


def _check_class_names(table: LabelTable, classes: Sequence[str]) -> list[CheckResult]:
    missing = [name for name in classes if name not in table.classes]
    advice = "Rename it in a file for --rename, or leave the column out with --ignore."
    results = [
        CheckResult("classes", "error", f"'{name}' is not a class of the study{hint} {advice}")
        for name, hint in find_unknown_classes(table.classes, classes)
    ]
    if missing:
        results.append(CheckResult("classes", "warning", f"not annotated here, so unknown: {', '.join(missing)}"))
    return results or [CheckResult("classes", "ok", f"all {len(classes)} classes of the study")]


def _show_digest(study: Experiment, clients: int | None) -> CheckResult:
    """The digest that `join --approve` takes, if the study's file determines everything that a site agrees to."""
    from fedmll.deploy.server.serve import study_digest

    elsewhere = "`fedmll server` and `fedmll join` show the digest of the study"
    if study.data.name != NO_DATA:
        return CheckResult("study", "ok", f"its classes and image size come from the server's own data: {elsewhere}")
    if clients is None:
        return CheckResult(
            "study", "ok", f"with --clients N (the number of clients) its digest is shown here; {elsewhere}"
        )
    try:
        digest = study_digest(study, clients)
    except FedmllError as error:
        return CheckResult("study", "warning", f"its digest cannot be computed here: {error} {elsewhere}")
    return CheckResult("study", "ok", f"its digest is {digest}; `fedmll join --approve` takes it")


def _check_columns(table: LabelTable) -> list[CheckResult]:
    results, seen = [], dict[bytes, str]()
    for place, (name, column) in enumerate(zip(table.classes, table.labels.T, strict=True)):
        values = set(np.unique(column).tolist())
        if invalid := table.invalid_cells.get(place):
            what = "is text, not labels" if values == {UNKNOWN} else "has text among its labels"
            text = f"'{name}' {what}: {invalid} cells are not 1, 0 or blank. Correct them, or use --ignore"
            results.append(CheckResult("labels", "warning", text))  # reading the data has reported it as an error
        elif values == {UNKNOWN}:
            results.append(CheckResult("labels", "warning", f"'{name}' is blank in every row: no label is known"))
        elif values == {PRESENT, UNKNOWN}:
            text = f"'{name}' has ones and blanks, but no 0. Blank means unknown; write 0 where it is absent"
            results.append(CheckResult("labels", "error", text))
        elif PRESENT not in values or ABSENT not in values:
            word = "absent" if PRESENT not in values else "present"
            text = f"'{name}' is {word} wherever it is known: little can be learnt from it"
            results.append(CheckResult("labels", "warning", text))
        else:
            twin = seen.setdefault(column.tobytes(), name)
            if twin != name:
                text = f"'{name}' and '{twin}' have the same labels in every row"
                results.append(CheckResult("labels", "warning", text))
    return results


def _check_copies(table: LabelTable) -> list[CheckResult]:
    """Files with the same bytes."""
    first: dict[bytes, int] = {}
    within: list[str] = []
    across: list[str] = []
    for row, path in enumerate(table.paths):
        try:
            with path.open("rb") as file:
                other = first.setdefault(hashlib.file_digest(file, "blake2b").digest(), row)
        except OSError:
            continue  # reported as unreadable
        if other != row:
            is_across = table.split is not None and table.split[other] != table.split[row]
            (across if is_across else within).append(f"'{table.names[row]}' is '{table.names[other]}'")
    results = []
    if across:
        text = f"{len(across)} images are also on the other side of the split: {abbreviate(across)}. Keep one of each"
        results.append(CheckResult("images", "error", text))
    if within:
        text = f"{len(within)} images are copies of others: {abbreviate(within)}"
        if table.split is None:
            text += ". The random split may put copies on both sides; keep one of each"
        results.append(CheckResult("images", "warning", text))
    return results


def _check_patients(site: Site, table: LabelTable) -> list[CheckResult]:
    """Whether patients are known. `check_site_data` has checked that no patient is on both sides of the split."""
    if table.patients is not None:
        count = len(set(table.patients.tolist()))
        return [CheckResult("patients", "ok", f"{count} by '{site.reading.group}', each on one side of every split")]
    likely = [name for name in site.reading.ignore if name.lower() in PATIENT_COLUMNS]
    if likely:
        text = f"'{likely[0]}' is ignored. With --group {likely[0]} no patient's images are on both sides of a split"
        return [CheckResult("patients", "warning", text)]
    return []


def _check_disk(site: Site, images: int, study: Experiment | None) -> CheckResult:
    """Space for the prepared images, by the study's image size."""
    size = DEFAULT_SIZE if study is None or study.data.size is None else study.data.size
    height, width = (size, size) if isinstance(size, int) else size
    channels = 3 if study is None or study.study is None else study.study.channels or 3
    needed = images * channels * height * width + SPARE_BYTES
    existing = next(folder for folder in (site.state_dir, *site.state_dir.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:.1f} GB free for {site.state_dir}, about {needed / 1e9:.1f} GB needed"
    return CheckResult("disk", "ok" if free > needed else "error", text)


def _check_keys(access: ServerAccess) -> list[CheckResult]:
    results = []
    for path, option in ((access.ca, "--ca"), (access.key, "--key")):
        if path is not None and not path.is_file():
            text = f"{path} does not exist ({option}); `fedmll keys --help` explains who creates it"
            results.append(CheckResult("keys", "error", text))
    if access.key is not None and access.key.is_file():
        try:
            check_private_file(access.key)
            load_private_key(access.key.read_bytes(), access.passphrase)
        except FedmllError as error:
            results.append(CheckResult("keys", "error", str(error)))
        except (ValueError, UnsupportedAlgorithm):
            results.append(CheckResult("keys", "error", f"{access.key} is not a key made by `fedmll keys new`"))
    if access.ca is not None and access.ca.is_file():
        try:
            left = (certificates.validity_period(access.ca)[1] - datetime.datetime.now(datetime.UTC)).days
        except FedmllError as error:
            return [*results, CheckResult("keys", "error", str(error))]
        level: Level = "error" if left <= 0 else "warning" if left < certificates.WARNING_DAYS else "ok"
        results.append(CheckResult("keys", level, f"{access.ca.name} expires in {left} days"))
    return results


def _check_server(access: ServerAccess) -> list[CheckResult]:
    """Whether the server answers, with a valid certificate, and whether the clocks agree."""
    try:
        offset = server_access.wait_for_server(access, lambda text: None).clock_offset
    except FedmllError as error:
        return [CheckResult("server", "error", str(error))]
    text = f"{access.server} answers" + ("" if access.ca is None else ", with a certificate of your CA")
    results = [CheckResult("server", "ok", text)]
    if offset is not None:
        level: Level = "ok" if abs(offset) <= server_access.MAX_CLOCK_OFFSET else "error"
        results.append(CheckResult("clock", level, server_access.describe_clock_offset(offset)))
    return results


def _check_versions() -> CheckResult:
    versions = {name: package_version(name) for name in PACKAGES}
    if versions["flwr"] is None:
        return CheckResult("version", "error", "Flower is not installed: pip install 'fedmll[flower]'")
    listed = ", ".join(f"{name} {version or 'from source'}" for name, version in versions.items())
    return CheckResult("version", "ok", listed)
