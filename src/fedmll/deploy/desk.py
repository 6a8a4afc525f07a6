"""What the operator of a run has before him: the journal, the audit, the status page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedmll.deploy import keys
from fedmll.deploy.audit import Audit, verify
from fedmll.deploy.barring import Bars
from fedmll.deploy.journal import Journal
from fedmll.deploy.setting import Server
from fedmll.deploy.status import Status, page
from fedmll.errors import printable
from fedmll.experiment import Experiment
from fedmll.running.folder import logging_to
from fedmll.running.observers import INTERRUPTED, Observer
from fedmll.running.tracking import Together


class Desk:
    def __init__(self, out: Path, server: Server, experiment: Experiment, observer: Observer) -> None:
        self.out, self.audit, self.status = out, Audit(out), Status(experiment, server)
        self.observer = Together(observer, self.status)
        self.say = Journal(out, observer, self.record).say
        self.marks = fingerprints(server)
        self.bars = Bars(out, None if server.keys is None else Path(server.keys), self.marks)
        self.ended = False
        about = {"run": server.run, "method": experiment.method.name, "rounds": experiment.training.rounds}
        about |= {"clients": server.clients, "validators": server.validators, "dropped": server.dropped}
        self.record("start", **about, keys=self.marks)

    def record(self, event: str, **facts: Any) -> None:
        """Into the audit. Who comes does so with a key, which is named by its fingerprint."""
        client = facts.get("client")
        mark = {"key": self.marks[client]} if event == "joined" and client in self.marks else {}
        self.audit.write(event, **facts, **mark)
        self.status.record(event, facts)

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended = True
            self.record("end", why=printable(why))


@contextmanager
def desk_of(out: Path, server: Server, experiment: Experiment, observer: Observer) -> Iterator[Desk]:
    desk = Desk(out, server, experiment, observer)
    try:
        with page(server.status, desk.status) as port:
            if port is not None:
                desk.say(f"status: http://{server.status}/")
            yield desk
    except BaseException as error:
        with suppress(OSError):  # a full disk, perhaps: what ended the run is said anyway
            desk.end(str(error) or INTERRUPTED)
        raise
    desk.end("finished")
    found = verify(desk.audit.path)
    text = f"{desk.audit.path.name} has {found.lines} lines; the last hash is {found.last}"
    with logging_to(out) as log:
        log.info(text)
    observer.warning(text)


def fingerprints(server: Server) -> dict[str, str]:
    """Name → of the public key."""
    if server.keys is None:
        return {}
    folder = Path(server.keys)
    there = [name for name in server.invited if (folder / f"{name}.pub").is_file()]  # all, where a port is open
    found = keys.registered(folder, there)
    return {name: keys.fingerprint(key.encode()) for name, key in found.items()}
