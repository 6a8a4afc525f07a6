"""Private label sets in whole rounds: twelve clients with four of ten labels each, networks with BatchNorm. What a
client learns, how the server averages and what it tunes are worked out again here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import SGD, Exchange, Round, Rounds, classifier, copy_of, merged, method_for, rounds_of, trained_by_hand
from builders import twelve as twelve_clients
from torch import Tensor
from torch.nn import functional as F

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.core.message import Tensors
from fedmll.data.federation import Federation, build
from fedmll.methods.framework.client_round import Batch, ClientInfo
from fedmll.models.flat_weights import FlatWeights

MISSING = {"annotation__kind": "missing", "annotation__missing": 3}


def twelve(**overrides: Any) -> Experiment:
    values: dict[str, Any] = {"data__name": "digits", "data__limit": 500, "method__name": "private-fedavg"}
    values |= {"partition__kind": "labels-per-client", "partition__labels_per_client": 4, "partition__server": 0.16}
    return twelve_clients(**values | overrides)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build(twelve())


@pytest.fixture(scope="module")
def played(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Round]]:
    """Two rounds, untuned, by labels and loss."""
    found = {}
    for labels in ("private", "public"):
        for loss in ("softmax", "sigmoid"):
            experiment = twelve(method__labels=labels, method__loss=loss, training__lr=0.01)
            with rounds_of(federation, experiment, tmp_path_factory.mktemp("rounds")) as rounds:
                found[labels, loss] = [rounds.next(), rounds.next()]
    return found


def own(federation: Federation, peer: ClientInfo) -> list[int]:
    """A client's classes, sorted by their names."""
    rows = peer.owned.nonzero().flatten().tolist()
    return sorted(rows, key=lambda row: federation.train.classes[row])


def named(rounds: Rounds, tensors: Tensors, outputs: int) -> Tensors:
    """A model's weights by their names."""
    return FlatWeights(classifier(rounds, outputs)).named(tensors)


# ---- the client


def loss_over(rows: list[int], kind: str, private: bool) -> Any:
    """Softmax over the client's outputs, without the samples that show none of its labels; or sigmoids, of what it
    annotates (public: of everything, as FedAvg)."""

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        targets = batch.targets[:, rows]
        present = (targets == 1).float()
        if kind == "softmax":
            shown = present.sum(1) == 1
            entries = F.cross_entropy(logits[shown], present[shown].argmax(1), reduction="sum")
            return entries / max(1, int(shown.sum()))
        counted = targets >= 0 if private else torch.ones_like(targets, dtype=torch.bool)
        return F.binary_cross_entropy_with_logits(logits[counted], present[counted])

    return loss


CLIENT_CASES = [
    ("softmax", {}, 0.0),
    ("sigmoid", {}, 0.0),
    ("softmax", {"training__augment": "shift"}, 0.0),
    ("sigmoid", {"training__augment": "shift"}, 0.0),
    ("softmax", {"method__name": "private-fedprox", "method__mu": 0.8}, 0.8),
    ("softmax", {"method__labels": "public"}, 0.0),
    ("sigmoid", {"method__labels": "public"}, 0.0),
    ("softmax", MISSING, 0.0),
    ("sigmoid", MISSING, 0.0),
]


@pytest.mark.parametrize(("kind", "options", "mu"), CLIENT_CASES, ids=str)
def test_client_trains_with_sgd_on_its_own_classes(
    federation: Federation, tmp_path: Path, kind: str, options: dict[str, Any], mu: float
) -> None:
    """In the second round; a model with as many outputs as the client has classes (public: with all). Where clients do
    not annotate everything they have different numbers of classes, one after the other in one process."""
    experiment = twelve(training__local_epochs=2, method__loss=kind, **SGD, **options)
    divided = build(experiment) if options is MISSING else federation
    private = experiment.method.options["labels"] == "private"
    with rounds_of(divided, experiment, tmp_path) as rounds:
        rounds.next()
        second = rounds.next()
        sets = {e.peer.index: own(divided, e.peer) if private else list(range(10)) for e in second.exchanges}
        assert {10, 11} <= sets.keys()
        assert (len({len(rows) for rows in sets.values()}) > 1) == (options is MISSING)
        for exchange in second.exchanges[:3]:
            rows = sets[exchange.peer.index]
            client, model = rounds.client(exchange.peer), classifier(rounds, len(rows))
            loss = loss_over(rows, kind, private)
            expected, mean = trained_by_hand(model, exchange.sent.tensors, client, loss, lr=0.1, mu=mu)
            torch.testing.assert_close(exchange.reply["weights"], expected["weights"], atol=2e-6, rtol=1e-5)
            assert exchange.reply["counters"].tolist() == expected["counters"].tolist()
            assert exchange.reply.numbers["loss"] == pytest.approx(mean, rel=1e-5)
            assert exchange.samples == len(client.data)


# ---- the average


@pytest.mark.parametrize("weights", ["size", "equal"])
@pytest.mark.parametrize("count", [12, 2])
def test_rows_are_averaged_over_their_owners_and_the_rest_over_all(
    federation: Federation, tmp_path: Path, weights: str, count: int
) -> None:
    """By name: encoder, BatchNorm's statistics (which lie after the head) and classifier. Rows that none of two
    clients has stay."""
    with rounds_of(federation, twelve(method__weighting=weights, participation__count=count), tmp_path) as rounds:
        rounds.next()
        second = rounds.next()
        replies = [
            (own(federation, e.peer), e.samples if weights == "size" else 1.0, e.reply) for e in second.exchanges
        ]
        models = [named(rounds, reply.tensors, len(rows)) for rows, _, reply in replies]
        before, after = (named(rounds, state, 10) for state in (second.before, second.after))
    sizes = np.array([size for _, size, _ in replies])
    owned = np.zeros(10, dtype=int)
    for name, found in after.items():
        if not found.is_floating_point():
            assert torch.equal(found, models[0][name])
        elif not name.startswith("head."):
            expected = np.tensordot(sizes / sizes.sum(), np.stack([m[name].double().numpy() for m in models]), 1)
            np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-5)
        else:
            total, rest = np.zeros(found.shape), np.zeros(10)
            for (rows, size, _), model in zip(replies, models, strict=True):
                for place, row in enumerate(rows):
                    total[row] += size * model[name][place].double().numpy()
                    rest[row] += size
                    owned[row] += name == "head.bias"
            for row in range(10):
                expected = total[row] / rest[row] if rest[row] else before[name][row].double().numpy()
                np.testing.assert_allclose(found[row], expected, atol=1e-6, rtol=1e-5)
    assert (owned == 0).any() == (count == 2)
    assert second.records["coverage"].tolist() == owned.tolist()
    assert second.records["labels_absent"] == (owned == 0).sum()


# ---- central tuning

STEPS = 15


def features_of(rounds: Rounds, tensors: Tensors, outputs: int, mode: str = "eval") -> tuple[Tensor, Tensor]:
    """The server's images as a model sees them, and the logits of the model's own head on them; float64."""
    model = classifier(rounds, outputs)
    FlatWeights(model).load(tensors)
    images = rounds.task.preprocess(torch.from_numpy(rounds.federation.server.samples(slice(None))))
    with torch.no_grad():
        features = model.train(mode == "train").features(images).double()
        return features, features @ model.head.weight.double().T + model.head.bias.double()


def predictions(rounds: Rounds, exchanges: list[Exchange], options: dict[str, str], mode: str) -> list[Tensor]:
    """h_k of every client on the server's images, over its own classes."""
    found = []
    for e in exchanges:
        rows = own(rounds.federation, e.peer)
        if options["labels"] == "private":
            _, z = features_of(rounds, e.reply.tensors, len(rows), mode)
            found.append(torch.softmax(z, 1) if options["loss"] == "softmax" else torch.sigmoid(z))
            continue
        _, z = features_of(rounds, e.reply.tensors, 10, mode)
        if options["loss"] == "sigmoid":
            found.append(torch.sigmoid(z)[:, rows])
        elif options["scope"] == "restricted":
            found.append(torch.softmax(z[:, rows], 1))
        else:
            found.append(torch.softmax(z, 1)[:, rows])
    return found


def tuned_by_hand(
    rounds: Rounds, exchanges: list[Exchange], state: Tensors, options: dict[str, str], mode: str = "eval"
) -> Tensor:
    """The classifier (10, width + 1) after STEPS steps of Adam on all the server's images at once."""
    sets = [own(rounds.federation, e.peer) for e in exchanges]
    p = predictions(rounds, exchanges, options, mode)
    features, _ = features_of(rounds, state, 10, mode)
    head = named(rounds, state, 10)
    weight = torch.cat([head["head.weight"], head["head.bias"][:, None]], 1).double().requires_grad_()
    optimizer = torch.optim.Adam([weight], 0.02)
    present = sorted(set().union(*sets))

    def h(z: Tensor, rows: list[int]) -> Tensor:
        if options["loss"] == "sigmoid":
            return torch.sigmoid(z)[:, rows]
        if options["scope"] == "restricted":
            return torch.softmax(z[:, rows], 1)
        support = present if options["tuning"] == "pairwise" else list(range(10))
        full = torch.zeros_like(z)
        full[:, support] = torch.softmax(z[:, support], 1)
        return full[:, rows]

    for _ in range(STEPS):
        z = features @ weight[:, :-1].T + weight[:, -1]
        loss = torch.zeros((), dtype=torch.float64)
        for own_p, rows in zip(p, sets, strict=True):
            q = h(z, rows)
            if options["tuning"] == "mse":
                loss = loss + ((own_p - q) ** 2).sum(1).mean()
            else:
                cross = own_p[:, :, None] * q[:, None, :]
                loss = loss + ((cross - cross.mT) ** 2).sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("scope", ["global", "restricted"])
@pytest.mark.parametrize("tuning", ["mse", "pairwise"])
@pytest.mark.parametrize(("labels", "loss"), [("private", "softmax"), ("public", "softmax"), ("private", "sigmoid")])
def test_the_classifier_is_tuned_to_the_clients_predictions(
    federation: Federation, played: Any, tmp_path: Path, labels: str, loss: str, tuning: str, scope: str
) -> None:
    """Of three clients, so that some labels are absent. Features and predictions in eval mode."""
    options = {"labels": labels, "loss": loss, "tuning": tuning, "scope": scope}
    settings: dict[str, Any] = {f"method__{key}": value for key, value in options.items()}
    settings |= {"method__tuning_steps": STEPS, "method__tuning_batch": 1000, "method__tuning_lr": 0.02}
    second = played[labels, loss][1]
    exchanges = second.exchanges[:3]
    assert len(set().union(*(own(federation, e.peer) for e in exchanges))) < 10
    with rounds_of(federation, twelve(**settings), tmp_path) as rounds:
        assert len(federation.server) > 64  # more than one batch
        untuned, _ = merged(method_for(federation, twelve(method__labels=labels)), second.before, exchanges, 2)
        found, _ = merged(rounds.method, second.before, exchanges, 2)
        expected, wrong = (tuned_by_hand(rounds, exchanges, untuned, options, mode) for mode in ("eval", "train"))
        by_name, plain = named(rounds, found, 10), named(rounds, untuned, 10)
    tuned = torch.cat([by_name["head.weight"], by_name["head.bias"][:, None]], 1).double()
    assert (tuned - expected).abs().max() < 1e-5
    assert (wrong - expected).abs().max() > 1e-2
    assert all(torch.equal(by_name[name], plain[name]) for name in plain if not name.startswith("head."))


def test_without_feedback_only_prediction_uses_the_tuned_classifier(federation: Federation, played: Any) -> None:
    first = played["private", "softmax"][0]
    settings = {"method__tuning": "mse", "method__tuning_steps": 5}
    plain, on, off = (
        method_for(federation, twelve(**more)) for more in ({}, settings, {**settings, "method__feedback": False})
    )
    states = [merged(method, first.before, first.exchanges, 1)[0] for method in (plain, on, off)]
    (peer,) = (e.peer for e in first.exchanges if e.peer.index == 11)
    sent = [method.send(state, peer, 2)["weights"] for method, state in zip((plain, on, off), states, strict=True)]
    deployed = [method.final_model(state)["weights"] for method, state in zip((plain, on, off), states, strict=True)]
    assert torch.equal(sent[0], sent[2]) and not torch.equal(sent[0], sent[1])
    assert torch.equal(deployed[1], deployed[2]) and not torch.equal(deployed[0], deployed[1])
    # and again: what was tuned in one round is not what the next round's average starts from
    again, _ = merged(off, states[2], first.exchanges, 2)
    torch.testing.assert_close(again["weights"], states[0]["weights"])
    assert not torch.equal(again["tuning/tuned"], states[2]["tuning/tuned"])  # other batches


def test_run_equals_these_rounds(federation: Federation, played: Any) -> None:
    result = run(twelve(method__loss="softmax", training__lr=0.01), prepared=federation)
    flat = torch.cat([tensor.flatten() for tensor in result.weights.values() if tensor.is_floating_point()])
    expected = played["private", "softmax"][1].after["weights"]
    assert torch.equal(flat.sort().values, expected.sort().values)


def test_messages_have_only_rows_of_the_clients_labels(federation: Federation, played: Any) -> None:
    for exchange in played["private", "softmax"][1].exchanges:
        before = played["private", "softmax"][0].after["weights"]
        assert len(exchange.sent["weights"]) == len(before) - 6 * (8 + 1)
        assert len(exchange.reply["weights"]) == len(exchange.sent["weights"])
        again = copy_of(exchange.sent)
        assert set(again.tensors) == {"weights", "counters"} and not again.numbers
