"""A person approves every study before a site takes part in it.

At a terminal the study is shown and asked for once; `approved.json` records its digest. Or the operator approves a
study in advance by its digest (`--approve`).

A join answers one setup only. A file next to the site file records the first setup that was answered, and the answer
(`SetupRecord`). Otherwise a server could compare the answers to several setups (for example with several hold-out
shares), and a difference can be one patient.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedmll.core import files
from fedmll.core.files import move_damaged_file
from fedmll.core.small_groups import MIN_GROUP_SIZE
from fedmll.core.text import Confirm, confirm_at_terminal, printable
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.deploy.security.audit_log import AuditLog
from fedmll.deploy.site.memory_estimate import GIGABYTE
from fedmll.methods import build_method
from fedmll.methods.framework.base import Part, overrides
from fedmll.methods.framework.task import Task
from fedmll.methods.parts.standardisation import Standardisation

FILE = "approved.json"
MAX_APPROVED = 100  # the latest ones are kept
SETUP_SUFFIX = ".setup"  # of the record of the setup that a join has answered
MAX_REPEATS = 10  # of the training, and of the test, of one round in a join
MAX_NAMED = 8  # settings that an error message names
SMALL_BATCH, LARGE_SHARE = 8, 0.5  # values beyond these are marked as unusual


def check_approved_digest(approved: str, digest: str) -> None:
    """Raise a SiteError if the server asks for a study other than the one that was approved with --approve."""
    if digest != approved:
        raise SiteError(
            SiteErrorCode.APPROVAL,
            f"The server asks for the study {digest}, and you approved the study {approved} (--approve). Nothing was "
            "sent except this refusal. Ask the server's operator what changed; to see the study, join at a terminal "
            "without --approve.",
        )


def describe_study(task: Task, training: int, held_out: int, memory: float) -> list[tuple[str, str]]:
    """What a person approves: the settings that decide how much is learnt about the images, and what leaves.

    `training` and `held_out` are numbers of images (without training images the site only validates), `memory` the
    bytes for the model and one batch. Returns pairs (name, value).
    """
    experiment = task.experiment
    batch, epochs = experiment.training.batch_size, experiment.training.local_epochs
    method = build_method(task)
    parts = [part for part in method.active_parts if part is not method.average_part]
    names = ", ".join(part.name for part in parts if _sends_reply(part))
    unusual = " (unusually many)" if training and held_out > LARGE_SHARE * (training + held_out) else ""
    passes = f"{epochs} pass{'es' if epochs > 1 else ''} over {'your images' if training else 'others’ images'}"
    return [
        ("method", experiment.method.name),
        ("rounds", f"{experiment.training.rounds}, each with {passes}"),
        ("batch", f"{batch}{' (unusually small)' if batch < SMALL_BATCH else ''}"),
        ("your images", f"{training} to train on, {held_out} held out for tests{unusual}"),
        ("image size", " × ".join(map(str, task.sample_shape))),
        ("model", f"{experiment.model.backbone}; with a batch about {memory / GIGABYTE:.2g} GB of memory"),
        ("clients", str(task.clients)),
        (
            "leaves once",
            "your name, numbers of images, the names of the classes you annotate and, for each class, the numbers of "
            "training images where it is present, absent and unknown (rounded to 5; no count below --min-count), a "
            "digest of the data, a few numbers that identify the frozen layers of the model",
        ),
        *_leaves_at_the_start(parts, training),
        (
            "leaves per round",
            "the trained weights, loss, number of images and steps" + (f"; for the parts: {names}" if names else "")
            if training
            else "nothing: you only validate",
        ),
        (
            "leaves per test",
            "metrics of the federated model on your held-out images, and for each class how many images have which "
            "score"
            if held_out
            else "nothing",
        ),
    ]


def request_approval(
    state_dir: Path, digest: str, rows: list[tuple[str, str]], show: Callable[[str], None], confirm: Confirm
) -> None:
    """Show a study (`rows` of `describe_study`) and ask for approval, unless it was approved before.

    Raises:
        SiteError: nobody approved.
    """
    approved = _read_approved(state_dir / FILE, show)
    if digest in approved:
        return
    show("The server asks for this study:")
    for name, value in [*rows, ("digest", digest)]:
        show(f"  {name:<16} {printable(value, 400)}")
    if not confirm("Take part?"):
        if not sys.stdin.isatty():
            show(
                "There is no terminal, so nobody can be asked. Join once at a terminal; or compare the digest above "
                "with the one that the server's operator sent you, and join with --approve DIGEST."
            )
        raise SiteError(SiteErrorCode.APPROVAL, "The study was not approved. Nothing was sent except this refusal.")
    approved[digest] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    approved = dict(list(approved.items())[-MAX_APPROVED:])
    files.write_atomic(state_dir / FILE, json.dumps(approved, indent=2) + "\n")
    AuditLog(state_dir).write("approved", digest=digest, at_terminal=confirm is confirm_at_terminal)


def _read_approved(path: Path, show: Callable[[str], None]) -> dict[str, str]:
    """Digest → time of approval."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        renamed = move_damaged_file(path).name
        show(f"warning: {path} cannot be read and was renamed to {renamed}. You are asked for approval again.")
        return {}


def _leaves_at_the_start(parts: Sequence[Part], training: int) -> list[tuple[str, str]]:
    found = [part for part in parts if isinstance(part, Standardisation)]
    if not training or not found:
        return []
    classes = "for all classes together" if found[0].private else "for each class"
    what = (
        f"before round 1: sums and sums of squares of the features of your training images and, {classes}, how many "
        f"labels are known and how many of them are present (counts below {MIN_GROUP_SIZE} of a class as 0)"
    )
    return [("leaves at start", what)]


def _sends_reply(part: Part) -> bool:
    """Whether a client's reply can contain tensors of the part."""
    kind = type(part)
    has_spec = bool(part.sums) or overrides(kind, "reply_spec")
    return has_spec and (overrides(kind, "on_round_end") or overrides(kind, "collect_statistics"))


@dataclass(frozen=True)
class SetupRecord:
    """What the server asked for in this join, and what was done for it."""

    setup: dict[str, Any]
    answer: dict[str, Any] | None = None  # the introduction that was sent; None: not sent yet
    work: dict[str, int] = field(default_factory=dict)  # "train 3" → how often round 3 was trained
    seconds: float = 0.0  # of training and testing

    def begin_work(self, kind: str, round: int, max_hours: float) -> SetupRecord:
        """The record with one more training or test of a round; a SiteError if the join has done enough of them.

        A round is repeated after an interruption or a failure. A server that asks for it again and again could learn
        more about the images than was approved.
        """
        key = f"{kind} {round}"
        if self.work.get(key, 0) >= MAX_REPEATS:
            raise SiteError(
                SiteErrorCode.LIMITS,
                f"The server has asked for round {round} ({kind}) {MAX_REPEATS} times already. Ask the server's "
                "operator why; to take part again, stop this join and join again.",
            )
        if self.seconds >= 3600 * max_hours:
            raise SiteError(
                SiteErrorCode.LIMITS,
                f"This join has trained and tested for {self.seconds / 3600:.1f} hours, and you allow {max_hours:g} "
                "(--max-hours). To take part again, stop this join and join again.",
            )
        return replace(self, work=self.work | {key: self.work.get(key, 0) + 1})

    def check_same_setup(self, setup: dict[str, Any]) -> None:
        """Raise a SiteError if this is not the setup that was answered."""
        names = find_differences(self.setup, setup)
        if names:
            shown = ", ".join(name.removeprefix("experiment.") for name in names[:MAX_NAMED])
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise SiteError(
                SiteErrorCode.SETUP,
                f"The server asks for a different setup than the one that this join has answered; {shown}{more} "
                "changed. A join answers one setup only. If the study changed, stop this join, ask the server's "
                "operator why, and join again: you then approve the new study.",
            )


def delete_setup_record(site_file: Path) -> None:
    """A new join starts: no setup was answered yet."""
    _setup_path(site_file).unlink(missing_ok=True)


def read_setup_record(site_file: Path) -> SetupRecord | None:
    """The record of the current join; None: no setup was answered yet."""
    try:
        values = json.loads(_setup_path(site_file).read_text())
        return SetupRecord(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise SiteError(
            SiteErrorCode.SETUP,
            f"{_setup_path(site_file)}, which records the setup that this join has answered, cannot be read. Stop this "
            "join and join again.",
        ) from None


def write_setup_record(site_file: Path, record: SetupRecord) -> None:
    files.write_atomic(_setup_path(site_file), json.dumps(asdict(record)))


def find_differences(one: Any, other: Any, name: str = "") -> list[str]:
    """The names of the settings that differ. 1, 1.0 and true are different values, as in a digest."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        return [
            found
            for key in keys
            for found in find_differences(one.get(key), other.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if json.dumps(one) == json.dumps(other) else [name]


def _setup_path(site_file: Path) -> Path:
    return site_file.with_suffix(SETUP_SUFFIX)
