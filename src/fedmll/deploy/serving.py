"""A real federation from the server's side: `serve` and `go_on`. A run's folder has, beside what every run has,

server.json   how the server is run (clients, deadlines, address, keys): what `fedmll resume` needs
sites.json    what each client said of its data when it first came
labels.csv    how many of each site's training images have a class, do not, or are not known to
flower/       Flower's own files and the SuperLink's log
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedmll import files
from fedmll.data import federation, sources
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress
from fedmll.deploy import certificates, keys, label_counts, labels, own_folder, setting, site, telling
from fedmll.deploy.desk import Desk, desk_of
from fedmll.deploy.journal import Journal
from fedmll.deploy.private import passphrase_of
from fedmll.deploy.setting import Server, server_in
from fedmll.deploy.site_worker import Setup
from fedmll.engines.base import Engine
from fedmll.errors import ConfigError, DataError, FederationError
from fedmll.experiment import Experiment
from fedmll.methods import find, make
from fedmll.models.flat import frozen_sketch
from fedmll.running import federated, loop
from fedmll.running.folder import MODEL
from fedmll.running.model import load_model
from fedmll.running.observers import Observer, Result
from fedmll.settings import NO_DATA
from fedmll.task import Task

if TYPE_CHECKING:
    from fedmll.deploy.flower.roster import Grid, Roster

RESUME = "Free some space, then go on with `fedmll resume`: nothing that was finished is lost."
RETURN_SECONDS = 60  # for clients to notice that a server is back

Confirm = Callable[[Sequence[str]], None]


@own_folder.private()
def serve(
    experiment: Experiment,
    server: Server,
    out: Path,
    observer: Observer | None = None,
    passphrase_file: Path | None = None,
    confirm: Confirm = label_counts.at_terminal,
) -> Result:
    """Run a federation from round 1, and leave a folder that `go_on` can go on with. A start that fails leaves none.
    `confirm` raises FederationError where nobody wants it with the labels that the sites have."""
    from fedmll.deploy.flower.processes import check_address

    _check(experiment)
    _check_start(experiment, server)
    if server.keys is not None:
        keys.server_files(Path(server.keys))
        keys.registered(Path(server.keys), server.invited)
        passphrase_of(Path(server.keys) / "server.key", passphrase_file)
        server = replace(server, keys=str(Path(server.keys).resolve()))
    loop.check_vacant(out)
    check_address(server.host, server.port)
    mine = own_data(experiment, observer or Observer())
    with files.room_for(out, RESUME):
        loop.create(out, settled(experiment, mine.test.sample_shape))
        setting.save(server, out)
    return go_on(out, observer, passphrase_file, confirm)


@own_folder.private()
def go_on(
    out: Path,
    observer: Observer | None = None,
    passphrase_file: Path | None = None,
    confirm: Confirm = label_counts.at_terminal,
) -> Result:
    """Start the federation in a folder, or go on with it from its last checkpoint."""
    from fedmll.deploy.flower.link import own_link
    from fedmll.deploy.flower.processes import FOLDER, Link, new_secret

    observer = observer or Observer()
    experiment, server = loop.experiment_in(out), server_in(out)
    if (out / "summary.json").exists():
        raise ConfigError(f"The run in {out} is over: its result is in summary.json and model.safetensors there.")
    with files.room_for(out, RESUME):
        journal = Journal(out, observer)
        link = Link(server.host, server.port, str(out / FOLDER), str(new_secret(out / FOLDER)), {})
        if server.keys is not None:
            folder = Path(server.keys)
            certificate, key, ca = keys.server_files(folder)
            passphrase = passphrase_of(key, passphrase_file)
            nodes, revoked = keys.registered(folder, server.invited), str(folder / keys.REVOKED)
            link = replace(link, nodes=nodes, certificate=str(certificate), key=str(key), ca=str(ca))
            link = replace(link, passphrase=passphrase, revoked=revoked)
            for note in certificates.ending(folder):
                journal.say(note)
        with own_link(link, journal.say) as connected:
            journal.say(f"listening on {server.host}:{server.port}, waiting for {', '.join(server.invited)}")
            return drive(connected.grid, experiment, server, out, observer, connected.alive, confirm)


@own_folder.private()
def drive(
    grid: Grid,
    experiment: Experiment,
    server: Server,
    out: Path,
    observer: Observer,
    alive: Callable[[], None] = lambda: None,
    confirm: Confirm = label_counts.at_terminal,
) -> Result:
    """The run itself, over any Grid of Flower's (a SuperLink's, or its simulation engine's)."""
    _check_start(experiment, server)
    own_folder.make_private(out)  # names and metrics of sites
    with desk_of(out, server, experiment, observer) as desk:
        return _drive(grid, experiment, server, out, desk, alive, confirm)


def _drive(
    grid: Grid,
    experiment: Experiment,
    server: Server,
    out: Path,
    desk: Desk,
    alive: Callable[[], None],
    confirm: Confirm,
) -> Result:
    from fedmll.deploy.flower.coming import of_sites, starts_without
    from fedmll.deploy.flower.engine import FlowerEngine
    from fedmll.deploy.flower.roster import Roster

    say, observer = desk.say, desk.observer
    mine = own_data(experiment, observer)
    classes, shape = mine.test.classes, mine.test.sample_shape
    method = make(Task(experiment, classes, shape, len(server.clients), torch.device("cpu")))
    setup = Setup(server.run, told(experiment), None if method.private else classes, shape, len(server.clients))
    frozen = {} if method.private else frozen_sketch(method.model())
    known = out / setting.SITES
    sets = _label_sets(server, classes) if method.private else None
    roster = Roster(
        grid, server.taking_part, server.keys is not None, setup.to_json(), known, say, classes, frozen, sets,
        server.validators, record=desk.record, bars=desk.bars,
    )  # fmt: skip
    _wait(roster, server, alive, setting.begun(out))
    prepared = of_sites(experiment, server, roster.introductions, mine.test, mine.unlabelled)
    if without := starts_without(prepared, server.taking_part, roster.introductions):
        say(without)
    label_counts.settle(out, classes, server.taking_part, roster.introductions, say, confirm)
    engines: list[FlowerEngine] = []

    def make_engine(data: Federation, _: Path, progress: Progress) -> Engine:
        engine = FlowerEngine(
            data, roster, out,
            min_clients=server.min_clients, round_timeout=server.round_timeout, tries=server.tries,
            alive=alive,
            progress=progress,
            max_share=server.max_share,
            goal=server.thresholds, calibrate=server.calibrate,
        )  # fmt: skip
        engines.append(engine)
        return engine

    result = loop.resume(out, observer=observer, prepared=prepared, make_engine=make_engine)
    label_counts.write(out, classes, server.taking_part, roster.introductions)  # with who came later
    engines[0].hand_over(load_model(out / MODEL), federated.by_site(out))
    desk.end("finished")
    engines[0].farewell(desk.audit.last)
    return result


def _label_sets(server: Server, classes: Sequence[str]) -> labels.Registered | None:
    """Without keys nobody is who he says he is, and there is nothing to register with."""
    return None if server.keys is None else labels.registered(Path(server.keys), server.everybody, classes)


def settled(experiment: Experiment, shape: tuple[int, ...]) -> Experiment:
    """The experiment with what the sites must not each decide for themselves."""
    return experiment.settled(federation.decisions(shape, has_validation=False) | {"partition.kind": "natural"})


def told(experiment: Experiment) -> dict[str, Any]:
    """What the sites are told of an experiment: not where the server's data lies, and none of its own settings."""
    values: dict[str, Any] = json.loads(
        experiment.model_dump_json(exclude_none=True, exclude={"data", "sites", "engine", "plugins"})
    )
    name = values["method"].pop("name")
    values["method"] = {"name": name} | find(name).told(values["method"])
    values["partition"].pop("server")
    return telling.by_digest(values) | {"data": {"name": NO_DATA}}


@dataclass(frozen=True)
class OwnData:
    """What the server itself has: test data (none: an empty one, with the classes and the shape), unlabelled images."""

    test: Dataset
    unlabelled: Dataset | None


def own_data(experiment: Experiment, observer: Observer) -> OwnData:
    data = experiment.data
    if data.name == NO_DATA:
        if experiment.sites is None or data.size is None:
            raise ConfigError(
                "data.name = 'none' is for a server without test data; it must then say what the clients have: "
                "sites.classes = ['…', '…'] and data.size (and sites.channels = 1 for grey images)."
            )
        height, width = (data.size, data.size) if isinstance(data.size, int) else data.size
        store = np.zeros((0, experiment.sites.channels, height, width), np.uint8)
        classes = experiment.sites.classes
        return OwnData(Dataset(store, np.zeros((0, len(classes)), np.int8), classes), None)
    if data.name.startswith("folder:"):
        file = Path(data.name.partition(":")[2]).expanduser()
        test, train, found = site.load_test(file, data.root, data.size, data.reading, observer.preparing)
        for note in found.notes:
            observer.warning(note)
        if not len(test):
            raise DataError(f"The server's own data, {data.name}, has no row with split = test.")
        return OwnData(test, train if len(train) else None)
    splits = sources.load(
        data.name, data.root, data.size, experiment.seed, data.composition, observer.preparing, data.reading
    )
    for note in splits.notes:
        observer.warning(note)
    return OwnData(splits.test, None)


def _check(experiment: Experiment) -> None:
    method = find(experiment.method.name)
    if method.pooled:
        raise ConfigError(
            f"'{method.name}' trains on all data in one place; a federation between machines exists to avoid that. "
            "Choose another method (`fedmll methods`)."
        )
    options = experiment.method.options
    if any(part.alone for part in method.recipe(method.options_class(options)(**options)).parts):
        raise ConfigError(f"'{method.name}' exchanges nothing, so there is nothing for a server to do.")
    if experiment.training.together is not None:
        raise ConfigError("training.together is for simulations: between machines every site trains alone.")
    if experiment.model.backbone == "mlp":
        raise ConfigError("A federation between machines is for images; feature vectors are for `fedmll run`.")


def _check_start(experiment: Experiment, server: Server) -> None:
    method = find(experiment.method.name)
    options = experiment.method.options
    parts = method.recipe(method.options_class(options)(**options)).parts
    opening = [part.name for part in parts if "opening" in part.exchanges]
    if opening and server.needed < len(server.taking_part):
        raise ConfigError(
            f"'{method.name}' asks every client once before round 1 ({', '.join(opening)}), so nobody can come later: "
            "leave --start-with out."
        )


def _wait(roster: Roster, server: Server, alive: Callable[[], None], begun: bool) -> None:
    """Until all are connected; or, when enough have come, a little longer for the others. A run that has begun waits
    for those who have been in it."""
    deadline, enough = time.monotonic() + server.join_timeout, math.inf
    while True:
        alive()
        roster.update()
        now, here = time.monotonic(), sum(name in server.taking_part for name in roster.members)
        came = [name for name in server.taking_part if name in roster.introductions]
        ready = len(came) >= server.needed and here >= server.min_clients
        if ready:
            enough = min(enough, now + RETURN_SECONDS)
            if here == len(came if begun else server.taking_part) or now > min(enough, deadline):
                return
        if now > deadline:
            missing = [name for name in server.taking_part if name not in came]
            who = f"{', '.join(missing)} did not come" if missing else f"only {here} clients are connected"
            raise FederationError(
                f"{who} in {server.join_timeout:g} s (--join-timeout). Nothing is lost: start `fedmll join` there, "
                "then go on with `fedmll resume` here; without somebody for now: `fedmll resume --start-with N`; for "
                "good: `fedmll resume --drop NAME`."
            )
        time.sleep(0.5)
