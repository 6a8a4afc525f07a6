"""FlowerEngine: rounds between machines.

The clients of a round follow from the seed and the clients' names. Nothing that arrives is trusted: a reply is checked
by itself (reply_checks.py) and compared with the others (outliers.py). If most clients diverge from the new model, the
engine returns to the model of the round before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.app import Message as FlowerMessage
from torch import Tensor

from fedmll.core.errors import TooFewReplies
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.deploy.flower import child_processes, site_evaluation
from fedmll.deploy.flower.client_app import BYE, EVALUATE, MODEL, TRAIN
from fedmll.deploy.flower.membership import Membership
from fedmll.deploy.flower.records import Info, to_records
from fedmll.deploy.flower.reply_checks import cap_shares
from fedmll.deploy.flower.request_guard import write_reply_limit
from fedmll.deploy.flower.round import POLL_SECONDS, FlowerRound, SiteStates, Transport
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.model_delivery import ModelDelivery, SiteThresholds, describe_undelivered
from fedmll.deploy.server import site_federation
from fedmll.engines.base import RoundResult
from fedmll.engines.local import choose_device
from fedmll.engines.trainer import Trainer
from fedmll.evaluation import metrics
from fedmll.evaluation.evaluate import Evaluation, evaluate_global_model
from fedmll.evaluation.histogram_metrics import FederatedHistograms
from fedmll.evaluation.histograms import evaluate_histograms
from fedmll.evaluation.metric_definitions import POOLED, SITES
from fedmll.inference.model_file import SavedModel
from fedmll.methods.base import TensorSpec
from fedmll.methods.client_round import ClientInfo, Reply
from fedmll.methods.task import task_of

BYE_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class PreviousRound:
    """The round before the current one."""

    number: int
    state: Tensors  # that it started from
    most_distant: tuple[str, float] | None  # the client whose update was furthest from the others', and the ratio


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
        self.notified: set[str] = set()  # notes on the sites' counts that the operator has seen

    def initial_state(self) -> Tensors:
        return self.method.initial_state()

    def federation_in(self, number: int) -> Federation:
        joined = self.membership.participants(number, self.min_clients)
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

        The round is tried again if there are too few valid replies, and from the model of the previous round if most
        clients diverge.
        """
        self.number = self.membership.round = number
        attempt, unusable = 1, set[str]()
        while True:
            current = self._new_round(state, number, unusable)
            current.collect(on_reply)
            if current.most_diverged and self.previous is not None and self.previous.most_distant is not None:
                current.restore_site_states()
                state = self._roll_back(self.previous, *self.previous.most_distant)
                continue
            try:
                current.reject_outliers()
                current.check_enough_replies()
                most_distant = current.updates.most_distant()
                self.previous = PreviousRound(number=number, state=state, most_distant=most_distant)
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
        )

    def _roll_back(self, previous: PreviousRound, name: str, ratio: float) -> Tensors:
        """Return to the model before the previous round, without the client that was furthest from the others in it.

        That client is the likely cause: from the model that its reply helped to make, most clients diverge.
        """
        self.previous = None  # at most one step back per round
        self.suspended.add(name)
        self.membership.notify(
            f"round {self.number} is tried again: from the model of round {previous.number} the training of most "
            f"clients diverges ({', '.join(self.transport.diverged)}), and none of them is rejected for it. The run "
            f"returns to the model before that round and continues without {name}, whose update was furthest from the "
            f"others' there ({ratio:.3g} times their median), until the server is restarted (permanently: `fedmll "
            "resume --drop`)."
        )
        return previous.state

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
            return self.method.send(message.tensors, client, self.number) if private else message, {}

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

    def deliver_model(self, model: SavedModel, site_thresholds: SiteThresholds) -> None:
        """Send the final model to all clients and validators, and name those that did not receive it."""
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

    def end_run(self, audit_hash: str = "") -> None:
        """Tell all connected clients that the run is over, and the last hash of the audit log.

        A client that does not receive this message notices that the server has ended.
        """
        self.transport.update_membership()
        content = {"setup": self.membership.setup, "audit": audit_hash}
        messages = [
            FlowerMessage(to_records(Message(), content), node, BYE, ttl=BYE_SECONDS)
            for node in self.membership.nodes_to_notify()
        ]
        waiting = [message_id for message_id in self.grid.push_messages(messages) if message_id] if messages else []
        deadline = time.monotonic() + BYE_SECONDS
        while waiting and time.monotonic() < deadline:
            answered = {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)}
            waiting = [message_id for message_id in waiting if message_id not in answered]
            time.sleep(POLL_SECONDS)
