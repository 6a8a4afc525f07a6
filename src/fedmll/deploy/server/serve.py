"""The server of a federation between machines: `serve` starts a run, `resume_server` continues one.

In addition to the files of every run, the run's folder has

- server.json: the server's settings (clients, deadlines, address, keys), which `fedmll resume` needs
- sites.json: what each client said about its data when it joined
- labels.csv: how many training images of each site have a class, do not, or have no label for it
- excluded.json: the clients that the operator has excluded
- flower/: Flower's own files and the SuperLink's log
- delivered.json: when the model was delivered to the sites. A finished run without it can be resumed for the delivery
- server.lock: locked while a server runs in the folder
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.addresses import format_address
from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.text import Confirm, confirm_at_terminal
from fedmll.deploy import label_counts
from fedmll.deploy.experiment_for_sites import build_setup, resolve_for_sites
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.security.private_keys import ec, load_private_key, read_passphrase
from fedmll.deploy.server import server_settings
from fedmll.deploy.server.console import OperatorConsole, OperatorLog, open_console
from fedmll.deploy.server.default_average import describe_average, tolerated_sites, with_default_average
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.site_federation import (
    ServerData,
    build_federation,
    describe_missing_clients,
    load_server_data,
)
from fedmll.deploy.site import site_folder
from fedmll.inference.model_file import load_model
from fedmll.methods import build_method, config_of
from fedmll.methods.framework.task import Task
from fedmll.models.flat_weights import sketch_frozen_tensors
from fedmll.runs.run_folder import MODEL_FILE, SUMMARY_FILE, RunFolder
from fedmll.training import federated_evaluation, round_loop
from fedmll.training.callbacks import Callback, Result
from fedmll.training.checkpoint import check_fingerprint

if TYPE_CHECKING:
    from fedmll.deploy.flower.child_processes import SuperLinkSettings
    from fedmll.deploy.flower.membership import Grid, Membership

DISK_FULL_ADVICE = "Free some space, then continue with `fedmll resume`: no finished round is lost."
DELIVERED_FILE, LOCK_FILE = "delivered.json", "server.lock"
RETURN_SECONDS = 60  # for clients to notice that a server is back


def check_can_be_federated(experiment: Experiment) -> None:
    """Raise a ConfigError if the experiment cannot run between machines."""
    name, method = experiment.method.name, config_of(experiment)
    if method.pooled:
        raise ConfigError(
            f"'{name}' trains on all data in one place, which a federation between machines exists to avoid. "
            "Choose another method (`fedmll methods`)."
        )
    if any("local-models" in part.provides for part in method.recipe.parts):
        raise ConfigError(f"'{name}' exchanges nothing, so a server has nothing to do.")
    if experiment.training.clients_per_batch is not None:
        raise ConfigError("training.clients_per_batch is for simulations: between machines every site trains alone.")
    if experiment.model.backbone == "mlp":
        raise ConfigError("A federation between machines is for images; feature vectors are for `fedmll run`.")


def check_can_start_with(experiment: Experiment, settings: ServerSettings) -> None:
    """Raise a ConfigError if the method needs all clients at the start, and not all are waited for."""
    opening = [part.name for part in config_of(experiment).recipe.parts if "opening" in part.exchanges]
    if opening and settings.clients_to_start < len(settings.participants):
        raise ConfigError(
            f"'{experiment.method.name}' asks every client once before round 1 ({', '.join(opening)}), so no client "
            "can join later: leave --start-with out."
        )


def study_digest(experiment: Experiment, clients: int) -> str:
    """The digest that the sites of such a federation approve (`fedmll join --approve`); no server is needed for it."""
    check_can_be_federated(experiment)
    test = load_server_data(experiment, Callback()).test
    resolved = resolve_for_sites(with_default_average(experiment, clients), test.sample_shape)
    return build_setup(resolved, test.classes, test.sample_shape, clients).digest


def never_ended() -> None:
    """For a Grid without a SuperLink of ours."""


@site_folder.private_files()
def serve(
    experiment: Experiment,
    settings: ServerSettings,
    out: Path,
    *,
    callback: Callback | None = None,
    passphrase_file: Path | None = None,
    confirm: Confirm = confirm_at_terminal,
) -> Result:
    """Run a federation from round 1.

    Args:
        experiment: what to run. With three clients or more it gets an average that tolerates faulty ones
            (default_average.py), unless it sets `method.average`.
        settings: the clients, deadlines, address and keys.
        out: the run's folder, which `resume_server` can continue. A start that fails creates no folder.
        callback: watches the run.
        passphrase_file: its first line is the passphrase of the server's key.
        confirm: asks the operator whether to start in spite of doubtful label counts.
    """
    from fedmll.deploy.flower.child_processes import open_listener

    check_can_be_federated(experiment)
    check_can_start_with(experiment, settings)
    if settings.keys is not None:
        folder = Path(settings.keys)
        certificates.find_tls_files(folder)
        client_keys.load_public_keys(folder, settings.invited)
        read_passphrase(folder / "server.key", passphrase_file)
        settings = replace(settings, keys=str(folder.resolve()))
    RunFolder(out).check_vacant()
    open_listener(settings.host, settings.port).close()
    data = load_server_data(experiment, callback or Callback())
    with files.explain_full_disk(out, DISK_FULL_ADVICE):
        averaged = with_default_average(experiment, len(settings.clients))
        RunFolder(out).create(resolve_for_sites(averaged, data.test.sample_shape))
        server_settings.write_server_settings(settings, out)
    return resume_server(out, callback=callback, passphrase_file=passphrase_file, confirm=confirm)


@site_folder.private_files()
def resume_server(
    out: Path,
    *,
    callback: Callback | None = None,
    passphrase_file: Path | None = None,
    confirm: Confirm = confirm_at_terminal,
    changes: Mapping[str, Any] | None = None,
    from_round: int | None = None,
) -> Result:
    """Start the federation in a folder, or continue it from its last checkpoint.

    If the rounds are done, but the model was not delivered to the sites, it is delivered.

    Args:
        out: the run's folder.
        callback: see `serve`.
        passphrase_file: see `serve`.
        confirm: see `serve`.
        changes: settings that change for the rest of the run (`change_server_settings`).
        from_round: continue with this round, from the checkpoint before it.
    """
    from fedmll.deploy.flower.superlink import run_superlink

    callback, folder = callback or Callback(), RunFolder(out)
    with files.explain_full_disk(out, DISK_FULL_ADVICE), lock_server_folder(out):
        if folder.is_finished and (out / DELIVERED_FILE).is_file():
            raise ConfigError(f"The run in {out} is over: its result is in {SUMMARY_FILE} and {MODEL_FILE} there.")
        experiment = folder.load_experiment()
        check_fingerprint(folder.checkpoint_folder, experiment.fingerprint())
        settings = server_settings.change_server_settings(out, **changes or {})
        if from_round is not None and not folder.is_finished:
            round_loop.return_to_round(out, from_round)
        log = OperatorLog(out, callback)
        superlink_settings = _superlink_settings(settings, out, passphrase_file)
        signing_key = None
        if settings.keys is not None:
            key_file = Path(settings.keys) / "server.key"
            signing_key = load_private_key(key_file.read_bytes(), superlink_settings.passphrase)
            for warning in certificates.expiry_warnings(Path(settings.keys)):
                log.notify(warning)
        address = format_address(settings.host, settings.port)
        with run_superlink(superlink_settings, log.notify) as superlink:
            log.notify(f"listening on {address}, waiting for {', '.join(settings.invited)}")
            return run_federation(
                superlink.grid,
                experiment,
                settings,
                out,
                callback=callback,
                check_alive=superlink.check_alive,
                confirm=confirm,
                signing_key=signing_key,
            )


@contextmanager
def lock_server_folder(out: Path) -> Iterator[None]:
    """Allow one server at a time in a run's folder, before anything is written there."""
    advice = "Nothing was changed. Stop that server first, or choose another folder with --out."
    with files.exclusive_lock(out / LOCK_FILE, f"A server is already running in {out}", advice, mode=0o600):
        yield


def _superlink_settings(settings: ServerSettings, out: Path, passphrase_file: Path | None) -> SuperLinkSettings:
    from fedmll.deploy.flower.child_processes import FOLDER, SuperLinkSettings, write_secret

    folder = out / FOLDER
    insecure = SuperLinkSettings(
        host=settings.host,
        port=settings.port,
        folder=str(folder),
        secret_file=str(write_secret(folder)),
        nodes={},
    )
    if settings.keys is None:
        return insecure
    keys = Path(settings.keys)
    certificate, key, ca = certificates.find_tls_files(keys)
    return replace(
        insecure,
        nodes=client_keys.load_public_keys(keys, settings.invited),
        certificate=str(certificate),
        key=str(key),
        ca=str(ca),
        passphrase=read_passphrase(key, passphrase_file),
        revoked=str(keys / client_keys.REVOKED_FILE),
    )


@site_folder.private_files()
def run_federation(
    grid: Grid,
    experiment: Experiment,
    settings: ServerSettings,
    out: Path,
    *,
    callback: Callback,
    check_alive: Callable[[], None] = never_ended,
    confirm: Confirm = confirm_at_terminal,
    signing_key: ec.EllipticCurvePrivateKey | None = None,
) -> Result:
    """Run a federation on a Grid of Flower: that of a SuperLink, or one of a test.

    `experiment` is the one in the run's folder. `check_alive` raises when the SuperLink has ended. `signing_key`
    is that of the server's certificate; it signs the head of the audit log.
    """
    check_can_start_with(experiment, settings)
    check_fingerprint(RunFolder(out).checkpoint_folder, experiment.fingerprint())  # before clients are waited for
    site_folder.make_private_folder(out)  # it has the names and metrics of sites
    with open_console(out, settings, experiment, callback, signing_key) as console:
        return _run_with_console(grid, experiment, settings, out, console, check_alive, confirm)


def _run_with_console(
    grid: Grid,
    experiment: Experiment,
    settings: ServerSettings,
    out: Path,
    console: OperatorConsole,
    check_alive: Callable[[], None],
    confirm: Confirm,
) -> Result:
    from fedmll.deploy.flower.engine import FlowerEngine

    notify, callback, folder = console.notify, console.callback, RunFolder(out)
    data = load_server_data(experiment, callback)
    classes = data.test.classes
    membership = _create_membership(grid, experiment, settings, out, console, data)
    _wait_for_clients(membership, settings, check_alive, server_settings.has_begun(out))
    federation = build_federation(experiment, settings, membership.introductions, data)
    missing = describe_missing_clients(federation, settings.participants, membership.introductions)
    if missing is not None:
        notify(missing)
    if not folder.is_finished:
        label_counts.confirm_label_counts(
            out, classes, settings.participants, membership.introductions, notify=notify, confirm=confirm
        )
    engine = FlowerEngine(
        federation,
        membership,
        out,
        min_clients=settings.min_clients,
        round_timeout=settings.round_timeout,
        max_attempts=settings.max_attempts,
        check_alive=check_alive,
        progress=callback.on_setup_progress,
        max_share=settings.max_share,
        thresholds=settings.thresholds,
        calibrate=settings.calibrate,
    )
    if folder.is_finished:
        notify("the rounds are done; the model is delivered to the sites")
        result = Result(
            experiment=experiment,
            folder=out,
            rows=folder.read_metrics(),
            summary=folder.read_summary(),
            weights=load_model(out / MODEL_FILE).weights,
        )
    else:
        result = round_loop.train(federation, engine, folder, callback)
    # once more: clients may have joined during the run
    label_counts.write_label_counts(out, classes, settings.participants, membership.introductions)
    for text in federated_evaluation.describe_deciding_sites(out):
        notify(text)
    delivered = engine.deliver_model(load_model(out / MODEL_FILE), federated_evaluation.read_site_thresholds(out))
    console.end("finished")
    engine.end_run()
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    files.write_atomic(out / DELIVERED_FILE, json.dumps({"time": when, "clients": sorted(delivered)}) + "\n")
    return result


def _create_membership(
    grid: Grid,
    experiment: Experiment,
    settings: ServerSettings,
    out: Path,
    console: OperatorConsole,
    data: ServerData,
) -> Membership:
    from fedmll.deploy.flower.membership import Membership

    classes, shape = data.test.classes, data.test.sample_shape
    setup = build_setup(experiment, classes, shape, settings.announced_clients, settings.run)
    console.notify(
        f"the study's digest is {setup.digest}; sites approve it at their terminal, or with `fedmll join --approve`"
    )
    console.record("study", digest=setup.digest)
    sites = len(settings.participants)
    average, tolerated = experiment.method.options.get("average"), tolerated_sites(experiment, sites)
    console.notify(describe_average(experiment, sites), "average", average=average, tolerated=tolerated)
    method = build_method(Task(experiment, classes, shape, len(settings.clients), torch.device("cpu")))
    private = method.has("private-labels")
    return Membership(
        grid=grid,
        clients=settings.participants,
        validators=settings.validators,
        has_keys=settings.keys is not None,
        setup=setup.to_json(),
        introductions_file=out / server_settings.INTRODUCTIONS_FILE,
        notify=console.notify,
        record=console.record,
        audit_head=lambda: console.audit_head,
        classes=classes,
        frozen={} if private else sketch_frozen_tensors(method.build_model()),
        # without keys no client is authenticated, so no label set can be registered
        label_sets=client_keys.read_label_sets(Path(settings.keys), settings.all_names, classes)
        if private and settings.keys is not None
        else None,
        exclusions=console.exclusions,
    )


def _wait_for_clients(
    membership: Membership, settings: ServerSettings, check_alive: Callable[[], None], has_begun: bool
) -> None:
    """Wait until all clients are connected; when enough have joined, wait a little longer for the others.

    A run that has begun waits for the clients that have taken part in it.
    """
    deadline, enough_deadline = time.monotonic() + settings.join_timeout, math.inf
    while True:
        check_alive()
        membership.update()
        now, connected = time.monotonic(), sum(name in settings.participants for name in membership.members)
        joined = [name for name in settings.participants if name in membership.introductions]
        if len(joined) >= settings.clients_to_start and connected >= settings.min_clients:
            enough_deadline = min(enough_deadline, now + RETURN_SECONDS)
            expected = len(joined if has_begun else settings.participants)
            if connected == expected or now > min(enough_deadline, deadline):
                return
        if now > deadline:
            missing = [name for name in settings.participants if name not in joined]
            problem = f"{', '.join(missing)} did not join" if missing else f"only {connected} clients are connected"
            raise FederationError(
                f"{problem} in {settings.join_timeout:g} s (--join-timeout). Nothing is lost: start `fedmll join` "
                "there, then continue with `fedmll resume` here. To continue without a client for now: `fedmll resume "
                "--start-with N`; permanently: `fedmll resume --drop NAME`."
            )
        time.sleep(0.5)
