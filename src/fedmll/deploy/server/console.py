"""What the operator of a run sees: messages on the screen and in the log, the audit log, and the status page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.core.text import printable
from fedmll.deploy.security import client_keys
from fedmll.deploy.security.audit_log import AuditHead, AuditLog, verify_audit_log
from fedmll.deploy.security.private_keys import ec
from fedmll.deploy.server.exclusions import Exclusions
from fedmll.deploy.server.server_settings import ServerSettings, has_begun
from fedmll.deploy.server.status import RunStatus, serve_status_page
from fedmll.runs.run_folder import MetricsRow, RunFolder
from fedmll.training.callbacks import INTERRUPTED, Callback, CallbackList

MAX_LINE = 600  # characters


class OperatorLog:
    """Shows messages on the screen, and writes them with the time to log.txt and to the audit log.

    A message may contain names and reasons that a client wrote, so control characters are removed here.
    """

    def __init__(self, out: Path, callback: Callback, record: Callable[..., None] | None = None) -> None:
        self.out, self.callback, self.record = out, callback, record or AuditLog(out, has_begun(out)).write

    def notify(self, text: str, event: str = "notice", **facts: Any) -> None:
        line = printable(text, MAX_LINE)
        self.record(event, **facts, text=line)
        with RunFolder(self.out).open_log() as log:
            log.info(line)
        self.callback.on_warning(line)


class OperatorConsole(Callback):
    """Everything through which a run and its operator communicate.

    Attributes:
        notify: shows a message to the operator.
        callback: passes the run's events to the caller's callback, the status page and this console.
        audit: the audit log.
        audit_head: its head at the end of the last round, which sites receive and keep.
        exclusions: which clients the operator has excluded.
    """

    def __init__(
        self,
        out: Path,
        settings: ServerSettings,
        experiment: Experiment,
        callback: Callback,
        signing_key: ec.EllipticCurvePrivateKey | None = None,
    ) -> None:
        self.out, self.audit, self.status = out, AuditLog(out, has_begun(out)), RunStatus(experiment, settings)
        self.callback = CallbackList(callback, self.status, self)
        self.run, self.round, self.audit_head = settings.run, 0, dict[str, Any]()
        self.signing_key = signing_key
        self.notify = OperatorLog(out, callback, self.record).notify
        self.fingerprints = read_fingerprints(settings)
        keys = None if settings.keys is None else Path(settings.keys)
        self.exclusions = Exclusions(out, keys, self.fingerprints)
        self.has_ended = False
        if self.audit.is_lost:
            self.notify(
                f"{self.audit.path.name} of this run is missing or empty: what was recorded before is lost, and "
                "`fedmll audit verify` will say so"
            )
        facts = {"run": settings.run, "method": experiment.method.name, "rounds": experiment.training.rounds}
        facts |= {"clients": settings.clients, "validators": settings.validators, "dropped": settings.dropped}
        self.record("start", **facts, keys=self.fingerprints)

    def record(self, event: str, **facts: Any) -> None:
        """Write an event to the audit log and pass it to the status page."""
        client = facts.get("client")
        key = {"key": self.fingerprints[client]} if event == "joined" and client in self.fingerprints else {}
        self.audit.write(event, **facts, **key)
        self.status.record(event, facts)

    def on_round_end(self, row: MetricsRow) -> None:
        self.round = row["round"]
        self.record("round", round=self.round)
        self._sign_head()

    def end(self, reason: str) -> None:
        """Write the end of the run to the audit log, once."""
        if not self.has_ended:
            self.has_ended = True
            self.record("end", reason=printable(reason))
            self._sign_head()

    def _sign_head(self) -> None:
        head = AuditHead(run=self.run, round=self.round, hash=self.audit.last_hash)
        self.audit_head = asdict(head if self.signing_key is None else head.sign(self.signing_key))


@contextmanager
def open_console(
    out: Path,
    settings: ServerSettings,
    experiment: Experiment,
    callback: Callback,
    signing_key: ec.EllipticCurvePrivateKey | None = None,
) -> Iterator[OperatorConsole]:
    """A console for the time of the block, which serves the status page and records how the run ended."""
    console = OperatorConsole(out, settings, experiment, callback, signing_key)
    try:
        with serve_status_page(settings.status, console.status) as port:
            if port is not None:
                console.notify(f"status: http://{settings.status}/")
            yield console
    except BaseException as error:
        with suppress(OSError):  # the disk may be full; the error itself is reported in any case
            console.end(str(error) or INTERRUPTED)
        raise
    console.end("finished")
    verified = verify_audit_log(console.audit.path)
    text = f"{console.audit.path.name} has {verified.lines} lines; the last hash is {verified.last_hash}"
    with RunFolder(out).open_log() as log:
        log.info(text)
    callback.on_warning(text)


def read_fingerprints(settings: ServerSettings) -> dict[str, str]:
    """By name: the fingerprint of the client's public key."""
    if settings.keys is None:
        return {}
    folder = Path(settings.keys)
    names = [name for name in settings.invited if (folder / f"{name}.pub").is_file()]
    keys = client_keys.load_public_keys(folder, names)
    return {name: client_keys.fingerprint(key.encode()) for name, key in keys.items()}
