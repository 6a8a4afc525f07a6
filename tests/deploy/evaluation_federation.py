"""A federation whose server has no data, so that all metrics come from the sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from consortium import CLASSES, NAMES, Consortium
from fake_grid import FakeNode, RecordingCallback, make_grid
from flwr.app import Message as FlowerMessage

from fedmll.core.message import Message
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site.site_config import Site, read_site_file, write_site_file
from fedmll.runs.run_folder import RunFolder
from fedmll.training import round_loop

ScoresAndLabels = list[tuple[np.ndarray, np.ndarray]]
ChangeReply = Callable[..., Message]  # kind, site, its reply, and its info, which may be changed in place


def unchanged(kind: str, name: str, message: Message) -> Message:
    return message


def run_without_server_data(
    consortium: Consortium,
    folder: Path,
    classes: Sequence[str] = CLASSES,
    change_reply: ChangeReply = unchanged,
    min_count: int = 10,
    server: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[Site], Site] = lambda site: site,
    **changes: Any,
) -> tuple[round_loop.Result, RecordingCallback]:
    """A server without data, one round by default; `change_reply` changes what a site sends, `change` the site."""
    grid, hear = make_grid(consortium, folder), RecordingCallback()
    for node in grid.nodes:
        here = read_site_file(node.site_file)
        write_site_file(change(replace(here, limits=replace(here.limits, min_count=min_count))), node.site_file)

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        message, info = from_records(reply.content)
        more = (info,) if len(signature(change_reply).parameters) == 4 else ()
        changed = change_reply(sent.metadata.message_type, node.name, message, *more)
        return reply if changed is message else FlowerMessage(to_records(changed, info), reply_to=sent)

    grid.tamper = tamper
    own = {"data.size": 8, "study.classes": list(classes), "study.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", **{"training__rounds": 1, **changes}).changed(own)
    RunFolder(folder / "out").create(experiment)
    usual: dict[str, Any] = {"min_clients": 2, "round_timeout": 5, "join_timeout": 2, "run": "run1"}
    usual["keys"] = str(consortium.keys)
    settings = ServerSettings(clients=NAMES, **{**usual, **server})
    return serve.run_federation(grid, experiment, settings, folder / "out", callback=hear), hear
