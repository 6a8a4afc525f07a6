"""One site of the test consortium: its configuration, a setup for it, and messages to its ClientApp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from consortium import CLASSES, Consortium, write_consortium
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity
from what_leaves import SITE

from fedmll.core.message import Message
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.flower import client_app
from fedmll.deploy.flower.client_app import TRAIN, app, join_state
from fedmll.deploy.flower.records import to_records
from fedmll.deploy.site.site_config import Site


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture(autouse=True)
def fresh_client_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ClientApp as in a process that has just started."""
    monkeypatch.setattr(client_app, "_workers", {})
    join_state.__dict__.update(client_app.JoinState().__dict__)
    yield
    join_state.__dict__.update(client_app.JoinState().__dict__)


def make_site_c(consortium: Consortium, folder: Path, **changes: Any) -> Site:
    home = consortium.folder
    site = Site(
        name=SITE,
        csv=home / SITE / "labels.csv",
        images=home / "images",
        state_dir=folder / "state",
        device="cpu",
    )
    return replace(site, **changes)


def make_setup(consortium: Consortium, **changes: Any) -> StudySetup:
    experiment = resolve_for_sites(consortium.server(**changes), (1, 8, 8))
    settings = settings_for_sites(experiment)
    return StudySetup(run="run1", experiment=settings, classes=tuple(CLASSES), shape=(1, 8, 8), clients=3)


def send_to_site(
    kind: str, info: dict[str, Any], site_file: Path, message: Message | None = None, **metadata: Any
) -> FlowerMessage:
    """The site's reply; `metadata` replaces fields of the message's metadata."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    sent = FlowerMessage(to_records(message or Message(), info), 2, kind if "kind" not in metadata else TRAIN)
    sent.metadata.__dict__["_message_id"] = "1"
    for name, value in metadata.items():
        sent.metadata.__dict__[f"_{name}"] = value
    return app(sent, Context(7, 2, {"site": str(site_file)}, RecordDict(), {}))
