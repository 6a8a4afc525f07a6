"""`released_counts.json` in a site's folder: the label counts that have left, with their study, run and data.

Counts are computed once and then repeated. Counts of the same images for another study (for example with another
hold-out share) could be compared with them, so the site's operator is warned before approving another study.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedmll.core import files
from fedmll.core.files import move_damaged_file
from fedmll.deploy import label_counts
from fedmll.deploy.label_counts import LabelCounts
from fedmll.deploy.security.audit_log import AuditLog

FILE = "released_counts.json"
MAX_ENTRIES = 100  # the latest ones are kept


@dataclass(frozen=True, kw_only=True)
class ReleasedCounts:
    """Label counts that have left the site."""

    study: str  # digest of the study
    run: str  # the server's name of the run
    data: str  # digest of the images and labels, training and held out
    time: str  # when the counts left (UTC)
    labels: LabelCounts  # the counts by class


def read_released_counts(state_dir: Path, show: Callable[[str], None] = print) -> list[ReleasedCounts]:
    """All entries, oldest first. A damaged file is renamed, with a warning."""
    path = state_dir / FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text())
        return [ReleasedCounts(**entry | {"labels": _as_tuples(entry["labels"])}) for entry in entries]
    except (ValueError, TypeError, AttributeError, IndexError, KeyError):
        renamed = move_damaged_file(path).name
        show(
            f"warning: {path} cannot be read and was renamed to {renamed}. It is not known which label counts have "
            "left before."
        )
        return []


def warn_about_other_studies(state_dir: Path, study: str, show: Callable[[str], None]) -> None:
    """Before a study is approved: warn if label counts left this site for other studies, and not yet for this one."""
    entries = read_released_counts(state_dir, show)
    others = {entry.study: entry.time for entry in entries if entry.study != study}
    if not others or any(entry.study == study for entry in entries):
        return
    listed = ", ".join(f"{digest} on {time}" for digest, time in list(others.items())[-3:])
    show(
        f"warning: label counts of this site have left before, for {len(others)} other "
        f"{'study' if len(others) == 1 else 'studies'} ({listed}). Whoever has both can compare them, and a difference "
        "can be one patient. Approve only if you know why there is another study."
    )
    AuditLog(state_dir).write("earlier label counts", study=study, others=list(others)[-MAX_ENTRIES:])


def release_counts(
    state_dir: Path,
    *,
    study: str,
    run: str,
    data: str,
    classes: Sequence[str],
    count: Callable[[], LabelCounts],
    show: Callable[[str], None] = print,
) -> LabelCounts:
    """The label counts that leave the site.

    For the same study and data they are the counts that left before. If the data changed within a run, no count
    leaves. Otherwise new counts are computed (`count`), and they are recorded before they leave.
    """
    entries = read_released_counts(state_dir, show)
    withheld = label_counts.withheld_counts(classes)
    same = next((entry for entry in entries if (entry.study, entry.data) == (study, data)), None)
    if same is not None:
        return {name: same.labels.get(name, row) for name, row in withheld.items()}
    if any(entry.run == run for entry in entries):
        return withheld
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    new = ReleasedCounts(study=study, run=run, data=data, time=now, labels=count())
    kept = [asdict(entry) for entry in (*entries, new)][-MAX_ENTRIES:]
    files.write_atomic(state_dir / FILE, json.dumps(kept, indent=1) + "\n")
    return new.labels


def _as_tuples(labels: LabelCounts) -> LabelCounts:
    return {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in labels.items()}
