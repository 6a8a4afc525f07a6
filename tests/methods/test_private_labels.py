"""Per-label aggregation and central tuning, against NumPy and hand-worked cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from PIL import Image
from safetensors.torch import load_file
from scipy.special import log_softmax
from torch import Tensor
from typer.testing import CliRunner

from fedmll import resume, run
from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError, ConfigError, DataError
from fedmll.core.message import Message
from fedmll.core.processes import single_thread
from fedmll.data import federation
from fedmll.data.dataset import Dataset
from fedmll.data.images.decode import read_images
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client, ClientInfo, TrainStep
from fedmll.methods.framework.task import Task
from fedmll.methods.parts.central_tuning import CentralTuning
from fedmll.methods.parts.classifier_rows import HeadRows, own_rows
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Classifier
from fedmll.reports.figures import label_coverage
from fedmll.runs.run_folder import MetricsRow
from fedmll.testing import aggregate, client_with, start_round
from fedmll.training.callbacks import Callback

NAMES = ("d", "b", "a", "c")  # not in their own order
PRIVATE = {"method__name": "private-fedavg", "data__name": "digits"}


def make(name: str = "private-fedavg", **options: Any) -> Trainer:
    """For 6-wide features of four classes; the encoder is one hidden layer of 5."""
    experiment = Experiment.make(
        {
            "data": {"name": "features:none.npz"},
            "method": {"name": name, **options},
            "model": {"channels": (5,)},
            "partition": {"clients": 3, "server": 0.1},
        }
    )
    server = Dataset(
        np.random.default_rng(9).normal(size=(50, 6)).astype(np.float32), np.zeros((50, 4), np.int8), NAMES
    )
    return Trainer(Task(experiment, NAMES, (6,), 3, torch.device("cpu"), server))


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    with single_thread():
        yield


def owning(*names: str) -> Tensor:
    return torch.tensor([name in names for name in NAMES])


def narrowed(trainer: Trainer, labels: np.ndarray, owned: Tensor) -> Client:
    """A client with these targets, as it sees itself."""
    features = np.random.default_rng(4).normal(size=(len(labels), 6)).astype(np.float32)
    data = Dataset(features, labels.astype(np.int8), NAMES)
    whole = replace(client_with(trainer, data, name="k"), annotated=owned, owned=owned)
    return trainer._restrict(whole)


# Rows


def test_a_clients_own_order_is_by_name() -> None:
    assert own_rows(NAMES, owning("d", "a", "c")).tolist() == [2, 3, 0]
    assert own_rows(("a", "x", "c", "d"), torch.tensor([True, False, True, True])).tolist() == [0, 2, 3]


def test_rows_are_split_from_flat_weights_and_joined_again() -> None:
    trainer = make()
    model, weights = trainer.model, trainer.weights
    head = HeadRows.of(weights)
    front, rows, back = head.split(weights.vector, 4)
    assert isinstance(model, Classifier)
    assert torch.equal(rows[:, :-1], model.head.weight)
    assert torch.equal(rows[:, -1], model.head.bias)
    assert torch.equal(head.join(front, rows, back), weights.vector)


@pytest.mark.parametrize("name", ["private-fedavg", "private-fedprox"])
def test_client_receives_a_model_with_only_its_rows(name: str) -> None:
    trainer = make(name)
    full, method = trainer.model, trainer.method
    message = method.send(method.initial_state(), ClientInfo(0, "k", owning("d", "a", "c")), 1)
    own = Classifier(make().model.backbone, 3)
    FlatWeights(own).load(message.tensors)
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32))
    torch.testing.assert_close(own(features), full(features)[:, [2, 3, 0]])
    assert set(message.tensors) == {"weights"}
    assert not message.numbers


def test_initial_rows_depend_only_on_class_names() -> None:
    trainer = make()
    other = Trainer(Task(trainer.task.experiment, ("z", "c", "b", "y", "a", "d"), (6,), 9, torch.device("cpu")))
    ours, theirs = trainer.model.head, other.model.head
    assert torch.equal(ours.weight[[0, 1, 2, 3]], theirs.weight[[5, 2, 4, 1]])
    assert torch.equal(ours.bias[[0, 1, 2, 3]], theirs.bias[[5, 2, 4, 1]])
    bound = 5**-0.5
    assert 0.85 * bound < ours.weight.abs().max() <= bound  # as torch initialises a linear layer
    assert 0.5 * bound < ours.bias.abs().max() <= bound
    assert len(set(ours.weight.flatten().tolist())) == 20


# Aggregation


def replies_of(trainer: Trainer, sets: list[tuple[str, ...]], sizes: list[int]) -> tuple[list[Any], np.ndarray]:
    """Replies with random weights; also these as full models (client, weight), NaN where a client has no row."""
    head, rng = HeadRows.of(trainer.weights), np.random.default_rng(6)
    replies, full = [], []
    for index, (names, size) in enumerate(zip(sets, sizes, strict=True)):
        owned = owning(*names)
        front, rows = torch.tensor(rng.normal(size=35)).float(), torch.tensor(rng.normal(size=(len(names), 6))).float()
        vector = head.join(front, rows, torch.empty(0))
        everything = np.full((4, 6), np.nan)
        for row, name in zip(rows.numpy(), sorted(names), strict=True):
            everything[NAMES.index(name)] = row
        replies.append(
            (ClientInfo(index, f"k{index}", owned), Message({"weights": vector}, {"samples": size, "loss": 1.0}))
        )
        full.append(head.join(front, torch.from_numpy(everything), torch.empty(0)).double().numpy())
    return replies, np.array(full)


def test_rows_are_averaged_over_their_owners() -> None:
    trainer = make()
    head = HeadRows.of(trainer.weights)
    sets, sizes = [("a", "b"), ("a",), ("b", "d")], [10, 30, 60]
    replies, full = replies_of(trainer, sets, sizes)
    state = trainer.method.initial_state()
    after, records = aggregate(trainer.method, state, iter(replies), 1)
    merged = after["weights"].double().numpy()
    weight = np.where(np.isnan(full), 0, np.array(sizes)[:, None])
    with np.errstate(invalid="ignore"):
        expected = (np.nan_to_num(full) * weight).sum(0) / weight.sum(0)
    expected = np.where(np.isnan(expected), state["weights"].numpy(), expected)  # row c, which nobody sent
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-7)
    _, old, _ = head.split(state["weights"], 4)
    _, new, _ = head.split(torch.from_numpy(merged).float(), 4)
    assert torch.equal(old[3], new[3])
    assert records["coverage"].tolist() == [1, 2, 2, 0]
    assert records["labels_absent"] == 1


def test_with_all_rows_the_average_is_fedavgs_bit_for_bit() -> None:
    trainer = make()
    head = HeadRows.of(trainer.weights)
    replies, _ = replies_of(trainer, [("a", "b", "c", "d")] * 3, [7, 11, 13])
    state = trainer.method.initial_state()
    by_label = aggregate(trainer.method, state, replies, 1)[0]["weights"]
    order = own_rows(NAMES, owning(*NAMES))
    fedavg = aggregate(make("fedavg").method, state, replies, 1)[0]["weights"]  # rows in the clients' order
    _, ours, _ = head.split(by_label, 4)
    _, theirs, _ = head.split(fedavg, 4)
    assert torch.equal(ours[order], theirs)
    assert torch.equal(by_label[:35], fedavg[:35])


@pytest.mark.parametrize(("private", "plain"), [("private-fedavg", "fedavg"), ("private-fedprox", "fedprox")])
def test_public_labels_that_all_clients_have_are_the_plain_method(private: str, plain: str) -> None:
    ours = run(small(method__name=private, method__labels="public", method__loss="sigmoid"))
    theirs = run(small(method__name=plain))
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
    assert ours.metrics == theirs.metrics


@pytest.mark.parametrize("change", [6, 12, -6])
def test_rows_of_other_clients_are_rejected(change: int) -> None:
    method = make().method
    sent = method.send(method.initial_state(), ClientInfo(0, "k", owning("a", "b")), 1)
    right = len(sent["weights"])
    reply = Message({"weights": torch.zeros(right + change)}, {"samples": 1.0})
    said = str(method.find_problem(sent, reply, 1))
    assert f"({right + change},), not torch.float32 ({right},)" in said
    assert "its classifier must have exactly one row for each of its own labels" in said
    assert method.find_problem(sent, Message(dict(sent.tensors), {"samples": 1.0}), 1) is None
    assert "NaN" in str(
        method.find_problem(sent, Message({"weights": sent["weights"] * torch.nan}, {"samples": 1.0}), 1)
    )
    assert "lacks" in str(method.find_problem(sent, Message({}), 1))


def test_a_client_without_a_label_of_its_own_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot train: k1\. Leave"):
        make().method.validate_clients([ClientInfo(0, "k0", owning("a")), ClientInfo(1, "k1", owning())])
    for count, more in ((5, ""), (6, " and 1 more"), (7, " and 2 more")):
        with pytest.raises(ConfigError, match=rf"cannot train: k0, k1, k2, k3, k4{more}\."):
            make().method.validate_clients([ClientInfo(index, f"k{index}", owning()) for index in range(count)])
    make().method.validate_clients([ClientInfo(0, "k0", owning("a"))])


# Losses at the client


def test_softmax_is_over_the_clients_own_classes() -> None:
    trainer = make()
    labels = np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])  # the third shows none of its own
    client = narrowed(trainer, labels, owning("b", "a"))
    assert client.data.classes == ("a", "b")
    assert client.task.classes == ("a", "b")
    assert client.model.head.out_features == 2
    batch = next(client.evaluation_batches())
    z = client.model(batch.images).detach().double().numpy()
    expected = -log_softmax(z, 1)[[0, 1, 3], [1, 0, 1]].mean()
    np.testing.assert_allclose(trainer.loss(TrainStep(start_round(trainer, client), batch)).item(), expected, rtol=1e-6)


def test_sigmoids_are_over_the_known_entries_of_the_own_classes() -> None:
    trainer = make(loss="sigmoid")
    labels = np.array([[1, 1, 0, 0], [0, -1, 1, 0], [0, 0, 0, 1]])
    client = narrowed(trainer, labels, owning("b", "a"))
    batch = next(client.evaluation_batches())
    z = client.model(batch.images).detach().double().numpy()
    y, known = labels[:, [2, 1]] == 1, labels[:, [2, 1]] >= 0
    entries = np.where(y, np.log1p(np.exp(-z)), np.log1p(np.exp(z)))
    found = trainer.loss(TrainStep(start_round(trainer, client), batch)).item()
    np.testing.assert_allclose(found, entries[known].mean(), rtol=1e-6)


def test_softmax_with_several_labels_is_refused() -> None:
    trainer = make()
    client = narrowed(trainer, np.array([[0, 1, 1, 0]] * 3), owning("b", "a"))
    with pytest.raises(ClientError, match="3 samples with two or more labels"):
        start_round(trainer, client)
    with pytest.raises(ConfigError, match=r"Use method\.loss = 'sigmoid'"):
        small(method__name="private-fedavg")


# Tuning in a run


def test_images_are_predicted_once_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = CentralTuning.features
    monkeypatch.setattr(CentralTuning, "features", lambda self, t: calls.append(1) or real(self, t))
    run(small(**PRIVATE, partition__server=0.2, method__tuning="mse", method__tuning_steps=30))
    assert len(calls) == 2 * (4 + 1)  # two rounds: four clients, and the merged model
    calls.clear()
    run(small(**PRIVATE, partition__server=0.2))
    assert not calls


def test_tuning_needs_images_at_the_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"partition\.server"):
        small(**PRIVATE, method__tuning="mse")
    with pytest.raises(ConfigError, match="not a folder with images"):
        small(**PRIVATE, method__tuning="mse", method__tuning_images=tmp_path)


def test_tuning_with_a_folder_of_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3), dtype=np.uint8)
    (tmp_path / "more").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / ("more" if i > 5 else ".") / f"{i:02d}.png")
    assert read_images(tmp_path, (1, 8, 8)).shape == (12, 1, 8, 8)
    tuned = run(small(**PRIVATE, method__tuning="pairwise", method__tuning_images=tmp_path))
    plain = run(small(**PRIVATE))
    assert not torch.equal(tuned.weights["head.weight"], plain.weights["head.weight"])
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"broken\.png"):
        run(small(**PRIVATE, method__tuning="mse", method__tuning_images=tmp_path))


def test_a_private_run_on_real_digits_learns() -> None:
    sets = {"partition__kind": "labels-per-client", "partition__labels_per_client": 5, "partition__server": 0.1}
    training = {"data__limit": 1000, "model__channels": (8, 16), "training__rounds": 5, "training__lr": 1e-2}
    result = run(small(**PRIVATE, **sets, **training))
    assert result.metrics["accuracy"] > 40
    share = result.per_class["accuracy"]
    assert share.shape == (10,)
    np.testing.assert_allclose(np.average(share, weights=result.per_class["positives"]), result.metrics["accuracy"])


@pytest.mark.parametrize("feedback", [True, False])
def test_same_bits_with_workers_and_after_resume(feedback: bool, tmp_path: Path) -> None:
    """`feedback` off keeps a second classifier in the server's state."""

    class Stop(Callback):
        def on_round_end(self, row: MetricsRow) -> None:
            if row["round"] == 1:
                raise KeyboardInterrupt

    settings = {"partition__server": 0.2, "method__tuning": "pairwise", "method__feedback": feedback}
    sets = {"partition__kind": "labels-per-client", "partition__labels_per_client": 5, "training__rounds": 3}
    whole = run(small(**PRIVATE, **settings, **sets))
    two = small(**PRIVATE, **settings, **sets, engine__workers=2)
    with pytest.raises(KeyboardInterrupt):
        run(two, tmp_path / "run", callback=Stop())
    resumed = resume(tmp_path / "run")
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)


# The audit and the sweep


def test_coverage_before_a_run_is_what_the_run_records(tmp_path: Path) -> None:
    experiment = small(
        **PRIVATE, partition__kind="labels-per-client", partition__labels_per_client=3, participation__count=2,
        training__rounds=3,
    )  # fmt: skip
    divided = federation.build(experiment)
    counts = label_coverage.compute_coverage(divided, 3)
    run(experiment, tmp_path / "run", prepared=divided)
    recorded = [load_file(file)["coverage"].tolist() for file in sorted((tmp_path / "run" / "records").iterdir())]
    assert counts.tolist() == recorded
    assert counts.sum(1).tolist() == [6, 6, 6]
    assert (counts == 0).any()


def test_coverage_table() -> None:
    counts = np.array([[1, 0], [2, 0], [0, 3], [1, 0]])
    _, rows = label_coverage.coverage_table(counts, ["x", "y"])
    assert rows == [["x", "0", "1.0", "2", "1", "1"], ["y", "0", "0.8", "3", "3", "2"]]
    assert label_coverage.coverage_csv(counts, ["x", "y"]).splitlines()[:2] == ["round,x,y", "1,1,0"]


def test_commands_work_with_private_labels(tmp_path: Path) -> None:
    file, out = tmp_path / "experiment.toml", tmp_path / "grid"
    experiment = small(**PRIVATE, partition__kind="labels-per-client", participation__count=2)
    file.write_text(experiment.changed({"partition.labels_per_client": 3}).to_toml())
    shown = CliRunner().invoke(app, ["data", "coverage", str(file), "--out", str(tmp_path / "coverage.csv")])
    assert shown.exit_code == 0, shown.output
    assert "rounds without" in shown.output
    assert len((tmp_path / "coverage.csv").read_text().splitlines()) == 1 + 2

    vary = ["--vary", "partition.labels_per_client=3,5", "--seeds", "0", "--metrics", "accuracy", "--out", str(out)]
    compared = CliRunner().invoke(app, ["compare", str(file), "--methods", "private-fedavg", *vary])
    assert compared.exit_code == 0, compared.output
    table = (out / "table.md").read_text()
    assert "private-fedavg:partition.labels_per_client=3" in table
    assert "private-fedavg:partition.labels_per_client=5" in table
