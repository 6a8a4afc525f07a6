"""FlowerEngine: rounds between machines.

The clients of a round follow from the seed and the clients' names. Nothing that arrives is trusted: a reply is checked
by itself (reply_checks.py) and compared with the others (outliers.py). If most clients diverge from the new model, the
engine returns to the model of the round before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Message as FlowerMessage
from torch import Tensor

from fedmll.core import files
from fedmll.core.errors import TooFewReplies
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.deploy.flower import child_processes, site_evaluation
from fedmll.deploy.flower.client_app import BYE, EVALUATE, MODEL, TRAIN
from fedmll.deploy.flower.membership import Membership
from fedmll.deploy.flower.outliers import Deviation
from fedmll.deploy.flower.records import Info, to_records
from fedmll.deploy.flower.reply_checks import cap_shares
from fedmll.deploy.flower.request_guard import write_reply_limit
from fedmll.deploy.flower.round import POLL_SECONDS, FlowerRound, SiteStates, Transport
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.model_delivery import ModelDelivery, SiteThresholds, describe_undelivered
from fedmll.deploy.server import site_federation
from fedmll.engines.base import RoundResult
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.devices import choose_device
from fedmll.evaluation import metrics
from fedmll.evaluation.evaluate import Evaluation, evaluate_global_model
from fedmll.evaluation.histogram_metrics import FederatedHistograms
from fedmll.evaluation.histograms import evaluate_histograms
from fedmll.evaluation.metric_definitions import POOLED, SITES
from fedmll.inference.model_file import SavedModel
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, Reply
from fedmll.methods.framework.task import task_of
from fedmll.runs.run_folder import RunFolder
from fedmll.training.checkpoint import load_checkpoint, without_best_model

BYE_SECONDS = 20
COMPARISON_FILE = "reply_comparison.json"  # in the run's folder: what a restarted server needs of the last round


@dataclass(frozen=True, kw_only=True)
class PreviousRound:
    """The round before the current one."""

    number: int
    state: Tensors  # that it started from
    client_states: dict[int, int]  # that its clients started from: client → round
    most_distant: Deviation | None  # of the client that was furthest from the others


class FlowerEngine:
    """Trains the clients of a federation between machines.

    Args:
        federation: as the server knows it (site_federation.py).
        folder: the run's folder; the replies of a round are buffered there.
        min_clients: how many valid replies a round needs.
        max_attempts: how often a round with too few replies is tried.
        check_alive: raises when the SuperLink has ended.
        max_share: the largest share of one client in an average by size.
        thresholds: what thresholds are chosen for, such as "f1".
    """

    def __init__(
        self,
        federation: Federation,
        membership: Membership,
        folder: Path,
        *,
        min_clients: int,
        round_timeout: float,
        max_attempts: int,
        check_alive: Callable[[], None],
        progress: Progress = no_progress,
        max_share: float = 1.0,
        thresholds: str = "f1",
        calibrate: str = "none",
    ) -> None:
        self.membership, self.grid, self.folder = membership, membership.grid, folder
        self.min_clients, self.max_attempts, self.max_share = min_clients, max_attempts, max_share
        self.thresholds, self.calibrate = thresholds, calibrate
        self.transport = Transport(
            membership,
            round_timeout=round_timeout,
            check_alive=check_alive,
            reply_specs=self._reply_specs,
            set_reply_limit=partial(write_reply_limit, folder / child_processes.FOLDER),
            check_newcomer=self._check_newcomer,
        )
        task = task_of(federation, choose_device(federation.experiment.engine.device))
        self.trainer = Trainer(replace(task, clients=len(federation.names) - len(membership.validators)))
        self.method = self.trainer.method
        self.federation = self.trainer.with_frozen_features(federation, progress)
        self.federation_in(federation.experiment.training.rounds + 1)
        self.method.validate_clients(self.clients)
        self.client_states = SiteStates()
        self.number = -1  # of the current round
        self.suspended: set[str] = set()  # clients that damaged a model, until the server is restarted
        self.previous: PreviousRound | None = None
        self.reply_digests: dict[bytes, tuple[str, int]] = {}  # of all replies: who sent it, and in which round
        self.earlier_medians: dict[str, float] = self._read_comparison().get("medians", {})
        self.shown_unusual: set[tuple[str, str]] = set()  # (client, kind)
        self.notified: set[str] = set()  # notes on the sites' counts that the operator has seen

    def initial_state(self) -> Tensors:
        return self.method.initial_state()

    def federation_in(self, number: int) -> Federation:
        joined = self.membership.participants(max(number, 0), self.min_clients)
        self.federation = site_federation.with_introductions(self.federation, joined)
        self.clients = site_federation.client_infos(self.trainer, self.federation, joined)
        return self.federation

    def _check_newcomer(self, introductions: Mapping[str, Introduction]) -> None:
        site_federation.check_newcomer(self.trainer, self.federation, introductions)

    @property
    def validators(self) -> list[ClientInfo]:
        names, introductions = self.membership.validators, self.membership.introductions
        return site_federation.validator_infos(self.federation, names, introductions)

    def audit_records(self) -> dict[str, float | Tensor]:
        return {}  # only a simulation knows the true labels

    def close(self) -> None:
        pass

    # ---- a round

    def run_round(self, state: Tensors, number: int, on_reply: Callable[[int], None]) -> RoundResult:
        """Collect the replies of a round, check and judge them, and aggregate those that are accepted.

        The round is tried again if there are too few valid replies, and from the state before the previous round if
        most clients diverge.
        """
        self.number, self.membership.round = number, max(number, 0)
        attempt, unusable = 1, set[str]()
        while True:
            current = self._new_round(state, number, unusable)
            current.collect(on_reply)
            if current.most_diverged:
                earlier_state = self._roll_back(current)
                if earlier_state is not None:
                    state = earlier_state
                    continue
                self.membership.notify(
                    f"from the model before round {number} the training of most clients diverges. If a reply of an "
                    "earlier round has damaged it, return to an earlier model: `fedmll resume --from-round N`, if "
                    "you know the client with --drop NAME."
                )
            try:
                current.reject_outliers()
                current.check_enough_replies()
                self._show_unusual(current)
                self._remember(current, state)
                return current.aggregate()
            except TooFewReplies as error:
                current.restore_site_states()
                unusable |= current.unusable
                if attempt == self.max_attempts:
                    raise
                attempt += 1
                self.membership.notify(f"round {number} is tried again: {error}")

    def _new_round(self, state: Tensors, number: int, unusable: set[str]) -> FlowerRound:
        chosen = self.trainer.participants(self.federation_in(number), number)
        clients = [client for index in chosen for client in self.clients if client.index == index]
        samples = {client.name: self.membership.introductions[client.name].samples for client in clients}
        return FlowerRound(
            number=number,
            state=state,
            clients=clients,
            skipped=unusable | self.suspended,
            samples=samples,
            shares=dict(zip(samples, cap_shares(list(samples.values()), self.max_share), strict=True)),
            min_replies=min(self.min_clients, len(clients)),
            trainer=self.trainer,
            transport=self.transport,
            site_states=self.client_states,
            folder=self.folder,
            earlier_medians=self.earlier_medians,
        )

    def _show_unusual(self, current: FlowerRound) -> None:
        """Show the operator unusual replies, each kind once per client; all of them are in the audit log."""
        for client, kind, text in current.comparison.find_unusual(self.reply_digests, current.number):
            if (client, kind) not in self.shown_unusual:
                self.shown_unusual.add((client, kind))
                self.membership.notify(f"round {current.number}: the reply of {client} is unusual: {text}")
            self.membership.record("unusual", round=current.number, client=client, kind=kind)

    def _remember(self, current: FlowerRound, state: Tensors) -> None:
        """What a rollback needs, also after a restart of the server."""
        most_distant = current.comparison.most_distant()
        self.previous = PreviousRound(
            number=current.number, state=state, client_states=current.states_before, most_distant=most_distant
        )
        self.earlier_medians = current.comparison.medians()
        content = {"round": current.number, "most_distant": most_distant, "medians": self.earlier_medians}
        files.write_atomic(self.folder / COMPARISON_FILE, json.dumps(content))

    def _roll_back(self, current: FlowerRound) -> Tensors | None:
        """Return to the state before the previous round, without the client that was furthest from the others in it.

        That client is the likely cause: from the model that its reply helped to make, most clients diverge. None: the
        run has no earlier state, or nobody can tell which client it was.
        """
        previous = self.previous or self._read_previous_round()
        self.previous = None  # at most one step back per round
        if previous is None or previous.most_distant is None or previous.most_distant.client in self.suspended:
            return None
        name, subject, ratio = previous.most_distant
        self.suspended.add(name)
        current.restore_site_states()
        kept = self.client_states.kept
        self.client_states.latest |= {
            client: round for client, round in previous.client_states.items() if kept is None or (client, round) in kept
        }
        self.membership.notify(
            f"round {self.number} is tried again: from the model of round {previous.number} the training of most "
            f"clients diverges ({', '.join(self.transport.diverged)}), and none of them is rejected for it. The run "
            f"returns to the state before that round and continues without {name}, whose {subject} was furthest from "
            f"the others' there ({ratio:.3g} times their median), until the server is restarted (permanently: `fedmll "
            "resume --drop`)."
        )
        return previous.state

    def _read_previous_round(self) -> PreviousRound | None:
        """After a restart: the round of the last checkpoint, and the state of the checkpoint before."""
        content, last = self._read_comparison(), self.number - 1
        if content.get("round") != last or content["most_distant"] is None:
            return None
        checkpoints = RunFolder(self.folder).checkpoint_folder
        found, _ = load_checkpoint(checkpoints, self.federation.experiment.fingerprint(), before=last)
        if found is None and last > 1:
            return None
        return PreviousRound(
            number=last,
            state=self.initial_state() if found is None else without_best_model(found.state),
            client_states={} if found is None else found.client_states,
            most_distant=Deviation(*content["most_distant"]),
        )

    def _read_comparison(self) -> dict[str, Any]:
        """What `_remember` wrote in the last round; nothing if the file is missing or damaged."""
        try:
            content = dict(json.loads((self.folder / COMPARISON_FILE).read_text()))
            return {name: content[name] for name in ("round", "most_distant", "medians")}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _reply_specs(self, kind: str, client: ClientInfo, message: Message) -> dict[str, TensorSpec]:
        if kind == TRAIN:
            return self.method.reply_spec(message, self.number)
        if kind == MODEL:
            return {}
        introduction = self.membership.introductions[client.name]
        return site_evaluation.evaluation_specs(client, introduction, self.method.has("private-labels"))

    # ---- evaluation

    def evaluate(self, message: Message) -> Evaluation:
        """Evaluate a model on the server's test data, if it has any, and on the sites' held-out data.

        The sites' results are the metrics of all their data together, computed from histograms, and the average of
        their own metrics by size.
        """
        report, values, scores = metrics.ClassificationReport({}, {}, {}), {}, {}
        if len(self.federation.test):
            self.trainer.receive(message)
            data = self.federation.test
            scores = {"test": self.trainer.predict(data, 0, len(data)).numpy()}
            central = evaluate_global_model(self.federation, scores)
            report, values = central.report, central.values
        replies = self._evaluate_at_sites(message)
        if not replies:
            return Evaluation(values, report, None, scores)
        introductions, names = self.membership.introductions, [client.name for client, _ in replies]
        weights = site_evaluation.held_out_weights(names, introductions, self.max_share)
        self._notify_once(site_evaluation.describe_lowered(weights, introductions))
        clients = site_evaluation.average_metrics(replies, introductions, weights)
        histograms = self._collect_histograms(replies, weights)
        pooled = evaluate_histograms(histograms.test, histograms.classes)
        for name, mean in clients.values.items():
            values[name if name.startswith("val_") else SITES + name] = mean
        values |= {POOLED + name: value for name, value in pooled.values.items()}
        return Evaluation(values, report if scores else pooled, clients, scores, histograms)

    def _evaluate_at_sites(self, message: Message) -> list[Reply]:
        private = self.method.has("private-labels")
        clients = [
            client
            for client in (*self.clients, *self.validators)
            if client.name not in self.suspended and self.membership.introductions[client.name].held_out
        ]

        def message_for(client: ClientInfo) -> tuple[Message, Info]:
            # a client with private labels may only see its own rows
            own_rows = self.method.send(message.tensors, client, self.number) if private else message
            return own_rows, {"round": max(self.number, 0)}

        replies = self.transport.exchange(EVALUATE, clients, message_for, 1) if clients else ()
        return [(client, reply) for client, reply, _ in replies]

    def _collect_histograms(self, replies: Sequence[Reply], weights: Mapping[str, float]) -> FederatedHistograms:
        classes, private = self.trainer.task.classes, self.method.has("private-labels")
        sites = site_evaluation.collect_histograms(replies, self.membership.introductions, classes, private, weights)
        for name, site in sites.items():
            self._notify_once(site_evaluation.describe_withheld(name, site))
        return FederatedHistograms(tuple(classes), sites, self.thresholds, self.calibrate)

    def _notify_once(self, texts: Sequence[str]) -> None:
        for text in texts:
            if text not in self.notified:
                self.membership.notify(text)
            self.notified.add(text)

    # ---- the end

    def deliver_model(self, model: SavedModel, site_thresholds: SiteThresholds) -> set[str]:
        """Send the final model to all clients and validators, and name those that did not receive it.

        Returns:
            The names of those that received it.
        """
        delivery = ModelDelivery(self.trainer, model, site_thresholds)
        self.transport.update_membership()
        clients = [each for each in (*self.clients, *self.validators) if each.name in self.membership.members]
        timeout = delivery.timeout(self.transport.round_timeout)
        replies = self.transport.exchange(MODEL, clients, delivery.message_for, 0, timeout)
        delivered = {reply.client.name for reply in replies}
        missing = [name for name in self.membership.names if name not in delivered]
        if missing:
            private = self.method.has("private-labels")
            self.membership.notify(describe_undelivered(missing, model.file, private))
        return delivered

    def end_run(self) -> None:
        """Tell all connected clients that the run is over.

        A client that does not receive this message notices that the server has ended.
        """
        self.transport.update_membership()
        messages = [
            FlowerMessage(to_records(Message(), self.membership.info), node, BYE, ttl=BYE_SECONDS)
            for node in self.membership.nodes_to_notify()
        ]
        waiting = [message_id for message_id in self.grid.push_messages(messages) if message_id] if messages else []
        deadline = time.monotonic() + BYE_SECONDS
        while waiting and time.monotonic() < deadline:
            answered = {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)}
            waiting = [message_id for message_id in waiting if message_id not in answered]
            time.sleep(POLL_SECONDS)
