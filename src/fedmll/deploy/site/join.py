"""`fedmll join`: connect a site to the server and serve it until the run is over.

The SuperNode is restarted when it ends (the server was restarted, the network failed). Errors that waiting cannot
solve, such as a key that the server does not know or an invalid certificate, end the join with a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from fedmll.core import files
from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.text import printable
from fedmll.data.images.cache import Progress, no_progress
from fedmll.deploy.error_codes import MAX_LINE, RejectionCode, explain_rejection
from fedmll.deploy.security.audit_log import AuditLog
from fedmll.deploy.site.memory_estimate import GIGABYTE
from fedmll.deploy.site.server_access import (
    MAX_CLOCK_OFFSET,
    ServerAccess,
    describe_clock_offset,
    wait_for_server,
)
from fedmll.deploy.site.site_config import SERVER_CERTIFICATE, Site, write_site_file
from fedmll.deploy.site.site_folder import FLOWER, clear_cache, lock_folder, private_files
from fedmll.deploy.site.worker import SiteWorker
from fedmll.training.callbacks import INTERRUPTED

RESTART_SECONDS = 1
FLUSH_SECONDS = 2  # until the SuperNode has forwarded the last reply


def join(
    site: Site,
    access: ServerAccess,
    show: Callable[[str], None],
    report: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Serve the federation until the run is over.

    All written files are readable by their owner only. Prepared images are deleted at the end, unless they are kept.

    Args:
        site: the site.
        access: how the server is reached.
        show: prints one line.
        report: at the end, compare the federated model with a local one (benefit_report.py).
        progress: called with the progress of the report.
    """
    for path in (access.ca, access.key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} does not exist. `fedmll keys` creates keys and shows which file goes to whom.")
    for path in site.local_files:
        if not path.exists():
            raise ConfigError(f"{path} does not exist (--weights).")
    site = replace(site, needs_approval=True)  # the only other way is a digest (--approve)
    with private_files(), lock_folder(site.state_dir):
        try:
            with audit_join(site, access, show):
                worker = _serve(site, access, show)
            if report and worker is not None:
                from fedmll.deploy.site.benefit_report import report_after_run

                report_after_run(worker, show, progress)
        finally:
            if not site.keep_cache:
                clear_cache(site.state_dir)


@contextmanager
def audit_join(site: Site, access: ServerAccess, show: Callable[[str], None]) -> Iterator[None]:
    """Write the first and the last line of a join to the audit log."""
    audit = AuditLog(site.state_dir)
    audit.write("join", name=site.name, server=access.server, **access.fingerprints)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            audit.write("end", reason=printable(str(error) or INTERRUPTED, MAX_LINE))
        raise
    audit.write("end", reason="the run is over")
    show(f"{audit.path}: the last hash is {audit.last_hash}")


def _serve(site: Site, access: ServerAccess, show: Callable[[str], None]) -> SiteWorker | None:
    """Serve until the run is over; the worker that received the final model, or None."""
    from fedmll.deploy.flower.child_processes import ChildProcess, SuperNodeSettings, find_free_port, write_secret
    from fedmll.deploy.flower.client_app import join_state
    from fedmll.deploy.flower.executor import TaskExecutor

    if access.proxy is not None:
        show(f"{access.server} is reached through the proxy {access.proxy} (HTTPS_PROXY)")
    answer = wait_for_server(access, show)
    if answer.clock_offset is not None and abs(answer.clock_offset) > MAX_CLOCK_OFFSET:
        show(f"warning: {describe_clock_offset(answer.clock_offset)}")
    folder = site.state_dir / FLOWER
    site_file, secret = folder / "site.json", write_secret(folder)
    write_site_file(site, site_file)
    deadline = time.monotonic() + access.patience
    while True:
        if answer.certificate:
            files.write_atomic(folder / SERVER_CERTIFICATE, answer.certificate)
        settings = SuperNodeSettings(
            server=access.server,
            port=find_free_port(),
            folder=str(folder),
            secret_file=str(secret),
            patience=access.patience,
            ca=None if access.ca is None else str(access.ca),
            key=None if access.key is None else str(access.key),
            passphrase=access.passphrase,
            server_certificate=answer.fingerprint,
        )
        child = ChildProcess("supernode", settings)
        try:
            executor = TaskExecutor(settings.port, secret, site_file, site.limits.max_memory * GIGABYTE)
            show(f"{site.name} waits for {access.server}")
            executor.serve(lambda child=child: not (child.has_ended() or join_state.not_approved))  # type: ignore[misc]
            if join_state.not_approved:
                time.sleep(FLUSH_SECONDS)
        finally:
            child.stop()
        if join_state.not_approved:
            raise FederationError(join_state.not_approved)
        if executor.run_ended and join_state.run_ended:
            if join_state.worker_with_model is None:
                show("the final model did not arrive; ask the server's operator for it")
            show("the run is over")
            return join_state.worker_with_model
        used, rejection = answer, explain_rejection(child.read_log(), access.server, site.name, access.key)
        if rejection is not None and rejection[0] is not RejectionCode.SERVER:  # waiting does not help
            raise FederationError(rejection[1])
        if executor.has_answered:
            deadline = time.monotonic() + access.patience
        if time.monotonic() > deadline:
            raise FederationError(
                f"{access.server} was not reachable for {access.patience:g} s (--patience). If its run ended "
                "meanwhile, ask its operator for the model."
            )
        show("the connection was lost; trying again")
        time.sleep(RESTART_SECONDS)
        answer = wait_for_server(access, show)
        if rejection is not None and answer.certificate == used.certificate:  # it was not renewed meanwhile
            raise FederationError(rejection[1])
