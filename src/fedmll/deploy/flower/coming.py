"""The federation as far as its clients have come. Of who has not come, or takes no further part, it has no sample and
no class; only its place in the list, which is there when it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedmll.client import Peer
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.deploy.flower.roster import Roster
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.setting import Server
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError, ReplyRefused
from fedmll.experiment import Experiment

Here = Mapping[str, Introduction]  # by name


def of_sites(
    experiment: Experiment, server: Server, here: Here, test: Dataset, unlabelled: Dataset | None
) -> Federation:
    """The federation as the server knows it, with the server's own data. Who only tests has a place, and no sample."""
    classes, names = test.classes, server.everybody
    nothing = Dataset(test.store[:0], np.zeros((0, len(classes)), np.int8), classes, np.zeros(0, np.int64))
    data = Federation(
        experiment,
        train=nothing,
        truth=nothing.labels,
        test=test,
        validation=nothing,
        held_out=nothing,
        held_out_owner=np.zeros(0, np.int64),
        names=names,
        samples=(),
        annotated=np.zeros((len(names), len(classes)), bool),
        allowed=np.ones((len(names), len(classes)), bool),
        report={},
        server=unlabelled,
        source=nothing,
        pooled_rows=np.zeros(0, np.int64),
        decided={},
    )
    return with_sites(data, {name: told for name, told in here.items() if name in server.clients})


def with_sites(data: Federation, here: Here) -> Federation:
    """With what these clients said of themselves: sizes and classes, not a single training sample."""
    classes = data.test.classes
    known = [[name in here and label in here[name].classes for label in classes] for name in data.names]
    counts = [here[name].samples if name in here else 0 for name in data.names]
    samples = tuple(np.broadcast_to(np.int64(0), count) for count in counts)  # no memory
    return replace(data, samples=samples, annotated=np.array(known))


def peers_of(learner: Learner, data: Federation, here: Here) -> list[Peer]:
    return [peer for peer in learner.peers(with_sites(data, here)) if peer.name in here]


def validating(data: Federation, roster: Roster) -> list[Peer]:
    """Who only tests, and has come."""
    came, classes = roster.introductions, data.test.classes
    return [
        Peer(place, name, torch.tensor([label in came[name].classes for label in classes]))
        for place, name in enumerate(data.names)
        if name in roster.validators and name in came
    ]


def check_newcomer(learner: Learner, data: Federation, here: Here) -> None:
    """What ends a start must not end a run: a client that the method cannot work with is refused when it comes late."""
    try:
        learner.method.begin(peers_of(learner, data, {name: told for name, told in here.items() if told.samples}))
    except ConfigError as error:
        raise ReplyRefused(f"the method cannot take it in: {error}") from None


def starts_without(data: Federation, names: Sequence[str], here: Here) -> str | None:
    """What the operator is told, once, where the run starts before all of `names` have come."""
    absent = [name for name in names if name not in here]
    unknown = np.array(data.test.classes)[~data.annotated.any(axis=0)]
    nobody = f"; nobody annotates {', '.join(unknown)} so far" if len(unknown) else ""
    return f"starts without {', '.join(absent)}; it may come later{nobody}" if absent else None
