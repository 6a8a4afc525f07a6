"""Standardised features and prior biases: exact statistics, nothing that a client can change, nothing that leaks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedmll import Experiment, load_run, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.allowed_replies import find_class_problem
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts import standardisation
from fedmll.methods.parts.averaging import WeightedAverage, WeightedAverageAggregator
from fedmll.methods.parts.standardisation import MEAN, SCALE, label_counts, prior_bias
from fedmll.models.frozen_features import backbone_outputs
from fedmll.models.standardise import mean_and_scale, pool_tokens
from fedmll.testing import aggregate, experiment, make_client, make_client_info, make_trainer

FROZEN: dict[str, Any] = {"model__freeze": "backbone", "model__weights": "random", "model__channels": (6, 16)}
OFF: dict[str, Any] = {"model__standardise": False, "model__bias": "zero"}


@pytest.mark.parametrize(
    ("changes", "pools"),
    [({}, True), ({"model__width": 8}, False), ({"method__name": "fednca-ml"}, False)],
    ids=["mean", "neck", "token head"],
)
def test_statistics_are_those_of_all_training_data(changes: dict[str, Any], pools: bool) -> None:
    made = experiment(**FROZEN, **changes)
    data = federation.build(made)
    weights = run(made, prepared=data).weights
    trainer = Trainer(task_of(data))
    rows = np.concatenate(data.samples)
    with torch.no_grad():
        tokens = backbone_outputs(trainer.model.backbone.eval(), trainer.task.model_inputs(data.train, rows)).double()
    features = pool_tokens(tokens) if pools else tokens.transpose(0, 1).flatten(1).T
    deviation = features.std(0, correction=0)
    smallest = 0.01 * deviation.square().mean().sqrt()
    torch.testing.assert_close(weights[MEAN].double(), features.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights[SCALE].double(), 1 / deviation.clamp(min=smallest), rtol=1e-4, atol=1e-4)


def test_initial_bias_is_the_log_odds_of_the_known_labels() -> None:
    made = experiment(**FROZEN, training__lr=1e-12, annotation__kind="missing", annotation__missing=4)
    data = federation.build(made)
    bias = run(made, prepared=data).weights["head.bias"]
    known, positive = np.zeros(10), np.zeros(10)
    for client in range(len(data.names)):
        labels = data.train.labels[data.samples[client]][:, :]
        own = np.where(data.annotated[client], labels, -1)
        known, positive = known + (own >= 0).sum(0), positive + (own == 1).sum(0)
    rate = (positive + 0.5) / (known + 1)
    np.testing.assert_allclose(bias.numpy(), np.log(rate / (1 - rate)), rtol=1e-5)


def test_unannotated_classes_get_the_mean_rate_and_no_bias_is_extreme() -> None:
    counts = torch.tensor([[100.0, 300.0, 0.0, 1e9], [10.0, 30.0, 0.0, 0.0]], dtype=torch.float64)
    bias = prior_bias(counts)
    total = counts.sum(1)
    assert float(bias[0]) == pytest.approx(np.log(10.5 / 90.5))
    assert float(bias[2]) == pytest.approx(max(-7, float(torch.logit((total[1] + 0.5) / (total[0] + 1)))))
    assert float(bias[3]) == -7


def test_constant_features_are_not_enlarged() -> None:
    features = torch.tensor([[1.0, 5.0, 0.0], [3.0, 5.0, 0.0], [5.0, 5.0, 1e-5]], dtype=torch.float64)
    moments = torch.stack([torch.full((3,), 3.0), features.sum(0), features.square().sum(0)])
    mean, scale = mean_and_scale(moments)
    standardised = (features - mean) * scale
    assert standardised[:, 0].std(correction=0) == pytest.approx(1)
    assert float(standardised[:, 1:].abs().max()) < 0.01
    constant = torch.tensor([[2.0], [10.0], [50.0]], dtype=torch.float64)
    assert torch.equal(mean_and_scale(constant)[1], torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("method", ["fed-ridge", "fedavg"])
def test_ridge_head_is_the_same_function_of_standardised_features(method: str, tmp_path: Path) -> None:
    start = {} if method == "fed-ridge" else {"method__start": "ridge", "training__lr": 1e-12}
    made = experiment(**FROZEN, method__name=method, **start)
    data = federation.build(made)
    run(made, tmp_path / "on", prepared=data)
    run(experiment(**FROZEN, **OFF, method__name=method, **start), tmp_path / "off")
    scores = [load_run(tmp_path / name).predict(data.test) for name in ("on", "off")]
    np.testing.assert_allclose(*scores, atol=1e-5)
    assert np.ptp(scores[0]) > 0.1


def test_ridge_start_refuses_a_layer_after_the_standardisation() -> None:
    with pytest.raises(ConfigError, match=r"Set model\.standardise = false, or leave model\.width out"):
        experiment(**FROZEN, method__start="ridge", model__width=8, model__norm="group")


def test_settings_follow_from_freeze() -> None:
    assert experiment().model.standardise is False and experiment().model.bias == "zero"
    frozen = experiment(**FROZEN).model
    assert frozen.standardise is True and frozen.bias == "prior"
    with pytest.raises(ConfigError, match=r"model\.standardise = true is for model\.freeze = 'backbone'"):
        experiment(model__standardise=True)
    result = run(experiment(model__bias="prior", training__lr=1e-12))  # a trained backbone: only the biases
    assert MEAN not in result.weights and float(result.weights["head.bias"].max()) < -0.5


def test_published_settings_switch_it_off(fedmll: Any, tmp_path: Path) -> None:
    settings = ["training.rounds=1", "partition.clients=3", "data.limit=60", "model.channels=[6, 10]"]
    frozen = ["model.freeze=backbone", "model.weights=random", "training.local_epochs=1", "participation.count=3"]
    options = [word for setting in settings + frozen for word in ("--set", setting)]
    code, _, error = fedmll("run", "--out", "run", "--method", "fedctran", "--as-published", *options)
    assert code == 0, error
    model = load_run(tmp_path / "run").experiment.model
    assert model.standardise is False and model.bias == "zero"


def reply_of_round(method: str, number: int, **changes: Any) -> tuple[Trainer, Tensors, Message, Message]:
    trainer = make_trainer(experiment(**FROZEN, method__name=method, **changes))
    labels = np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0]])
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 3), number)
    return trainer, state, sent, trainer.train(make_client(trainer, labels, round=number), sent, {})


def test_changed_statistics_are_rejected() -> None:
    trainer, _, sent, reply = reply_of_round("fedavg", 1)
    assert trainer.method.find_problem(sent, reply, 1) is None
    for place in (-1, -trainer.weights.server_count):
        weights = reply["weights"].clone()
        weights[place] += 1e-3
        problem = trainer.method.find_problem(sent, Message({"weights": weights}, reply.numbers), 1)
        assert "changed the mean or the scale of the features" in str(problem)


def test_large_statistics_do_not_loosen_the_bound_of_an_update() -> None:
    trainer, state, _, reply = reply_of_round("fedavg", 1)
    count = trainer.weights.server_count
    state["weights"][-count:] = 1e6
    sent = trainer.method.send(state, make_client_info(0, 3), 1)
    weights = torch.cat([reply["weights"][:-count], state["weights"][-count:]])
    assert trainer.method.find_problem(sent, Message({"weights": weights}, reply.numbers), 1) is None
    weights[0] = 1e4
    assert "moved by" in str(trainer.method.find_problem(sent, Message({"weights": weights}, reply.numbers), 1))


def test_average_keeps_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an average that rounds."""
    trainer, state, _, reply = reply_of_round("fedavg", 1)
    count = trainer.weights.server_count
    statistics = torch.rand(count, generator=torch.Generator().manual_seed(0))
    state["weights"][-count:] = statistics

    class Rounding(WeightedAverageAggregator):
        def result(self, merged: Tensors) -> Any:
            own, records = super().result(merged)
            return {"weights": own["weights"].bfloat16().float()}, records

    for aggregator in (WeightedAverageAggregator, Rounding):
        monkeypatch.setattr(
            WeightedAverage,
            "aggregator",
            lambda self, *_, kind=aggregator: kind(lambda reply: reply.numbers["samples"]),
        )
        replies = [
            (
                make_client_info(k, 3),
                Message({"weights": torch.cat([reply["weights"][:-count], statistics])}, {"samples": float(3 + k)}),
            )
            for k in range(3)
        ]
        merged, _ = aggregate(trainer.method, state, replies, 1)
        assert torch.equal(merged["weights"][-count:], statistics)


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("moments", lambda t: 2 * t, "its sums are of 8 samples, and it has 4"),
        ("moments", lambda t: t * torch.tensor([[1.0], [1e3], [1.0]]), "do not fit together"),
        ("moments", lambda t: t * torch.tensor([[1.0], [1.0], [1e12]]), "its features are larger than"),
        ("labels", lambda t: t + 4, "more known labels than samples"),
        ("labels", lambda t: t.flip(0) + torch.tensor([[0.0], [1.0]]), "more positives than known labels"),
        ("labels", lambda t: -t, "outside"),
    ],
)
def test_implausible_statistics_are_rejected(key: str, change: Any, text: str) -> None:
    trainer, _, sent, reply = reply_of_round("fedavg", 0)
    assert trainer.method.find_problem(sent, reply, 0) is None
    lie = Message(reply.tensors | {f"standardise/{key}": change(reply[f"standardise/{key}"])}, reply.numbers)
    assert text in str(trainer.method.find_problem(sent, lie, 0))


def test_counts_of_classes_that_a_client_does_not_annotate_are_rejected() -> None:
    trainer, _, sent, reply = reply_of_round("fedavg", 0)
    specs = trainer.method.reply_spec(sent, 0)
    assert find_class_problem(specs, reply, torch.tensor([True, True, True])) is None
    assert "standardise/labels" in str(find_class_problem(specs, reply, torch.tensor([True, True, False])))


def test_private_labels_send_one_count_for_all_classes() -> None:
    """Two clients with other classes, but as many labels, send the same: the classes do not show."""
    trainer = make_trainer(experiment(**FROZEN, method__name="private-fedavg", method__loss="sigmoid"))
    sent_by_class = []
    for own in ((0, 1), (1, 2)):
        labels = np.full((4, 3), -1)
        labels[:, list(own)] = [[1, 0], [0, 1], [1, 1], [0, 0]]
        info = make_client_info(0, 3, own)
        sent = trainer.method.send(trainer.method.initial_state(), info, 0)
        reply = trainer.train(make_client(trainer, labels, round=0), sent, {})
        assert trainer.method.find_problem(sent, reply, 0) is None
        assert reply["standardise/labels"].tolist() == [[8.0], [4.0]]
        sent_by_class.append(reply)
    assert all(torch.equal(tensor, sent_by_class[1][name]) for name, tensor in sent_by_class[0].tensors.items())
    state, _ = aggregate(trainer.method, trainer.method.initial_state(), [(make_client_info(0, 3), reply)], 0)
    bias = trainer.weights.named(state)["head.bias"]
    assert torch.equal(bias, torch.zeros(3))  # half of the labels are positive


def test_small_counts_do_not_leave() -> None:
    targets = torch.zeros(100, 4, dtype=torch.int8)
    targets[:3, 0] = 1  # three positives
    targets[3:, 1] = 1  # all but three
    targets[:97, 2] = -1  # three known
    targets[:40, 3] = 1
    known, positive = label_counts(targets, 5)
    assert known.tolist() == [100, 100, 0, 100]
    assert positive.tolist() == [0, 100, 0, 40]
    assert label_counts(targets, 1)[1].tolist() == [3, 97, 0, 40]


def test_local_only_has_statistics_of_each_client_and_exchanges_nothing() -> None:
    made = experiment(**FROZEN, method__name="local-only")
    data = federation.build(made)
    trainer = Trainer(task_of(data))
    states: list[Tensors] = []
    for info in trainer.client_infos(data)[:2]:
        state: Tensors = {}
        for number in (1, 2):
            client = trainer.client_in_round(data, info, number)
            reply = trainer.train(client, trainer.method.send(trainer.method.initial_state(), info, number), state)
            assert not reply.tensors
        states.append(state)
        own = trainer.weights.named({"weights": state["local-models/weights"], "counters": torch.zeros(0)})
        images = trainer.task.model_inputs(client.data, slice(None))
        with torch.no_grad():
            features = pool_tokens(backbone_outputs(trainer.model.backbone.eval(), images)).double()
        torch.testing.assert_close(own[MEAN].double(), features.mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.equal(states[0]["local-models/weights"], states[1]["local-models/weights"])
    assert [row["round"] for row in run(made).rows] == [1, 2]


@pytest.mark.parametrize("method", ["fedavg", "local-only", "fedprox"])
def test_several_clients_at_once(method: str) -> None:
    made = experiment(**FROZEN, method__name=method)
    one, several = run(made).weights, run(made.changed({"training.clients_per_batch": 4})).weights
    for name, tensor in one.items():
        torch.testing.assert_close(several[name], tensor, atol=1e-4, rtol=1e-4)
    assert torch.equal(several[MEAN], one[MEAN])


def test_any_number_of_workers_and_a_late_evaluation_give_the_same_bits() -> None:
    made = experiment(**FROZEN, annotation__kind="missing", annotation__missing=4, participation__count=2)
    one, two = run(made), run(made.changed({"engine.workers": 2}))
    assert all(torch.equal(tensor, two.weights[name]) for name, tensor in one.weights.items())
    assert "map" not in one.rows[0] and one.rows[0]["clients"] == 4  # all clients, though two train in a round


def test_experiment_file_keeps_the_settings(tmp_path: Path) -> None:
    made = experiment(**FROZEN)
    (tmp_path / "e.toml").write_text(made.to_toml())
    assert Experiment.load(tmp_path / "e.toml").model == made.model


def test_one_known_label_is_a_rate() -> None:
    """(1 + ½) / (1 + 1) has the log-odds log 3, and ½ / 10 those of 1 : 19."""
    counts = torch.tensor([[1.0, 9.0], [1.0, 0.0]]).double()
    torch.testing.assert_close(prior_bias(counts), torch.tensor([np.log(3), -np.log(19)]).double())


def test_moments_of_tokens_are_means_over_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples with two features at two positions, in evaluation mode. Feature 0: 1 and 3, then 0 and 0; feature 1:
    2 and 2, then 4 and 6."""
    tokens = torch.tensor([[[1.0, 3.0], [2.0, 2.0]], [[0.0, 0.0], [4.0, 6.0]]])[..., None]
    monkeypatch.setattr(standardisation, "backbone_outputs", lambda backbone, images: images)
    model = torch.nn.Module()
    model.backbone = SimpleNamespace(standardise=SimpleNamespace(width=2, inputs=lambda outputs: outputs))
    client = SimpleNamespace(
        task=SimpleNamespace(device=torch.device("cpu")),
        data=range(2),
        evaluation_batches=lambda: [SimpleNamespace(images=tokens[:1]), SimpleNamespace(images=tokens[1:])],
    )
    client_round: Any = SimpleNamespace(model=model, client=client, transform_images=lambda images: images)
    found = standardisation.feature_moments(client_round)
    assert found.tolist() == [[2, 2], [2 + 0, 2 + 5], [(1 + 9) / 2, (4 + 4) / 2 + (16 + 36) / 2]]
    assert not model.training
