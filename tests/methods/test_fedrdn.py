"""FedRDN: its statistics against NumPy, what the network sees, and what it cannot work with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

from fedmll import load_run, run
from fedmll.core.errors import ConfigError, ReplyRejected
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.fedrdn import RandomNormalisation
from fedmll.methods.framework.client_round import TrainStep
from fedmll.testing import aggregate, experiment, first_step, make_client, make_client_info, make_trainer, start_round

PART = "random-normalisation"
POOL, MEAN, STATISTICS = f"{PART}/pool", f"{PART}/mean", f"{PART}/statistics"
LABELS = np.random.default_rng(0).integers(0, 2, (70, 3))


def made(**changes: Any) -> Trainer:
    return make_trainer(small(method__name="fedrdn", **changes), shape=(3, 8, 8), clients=4)


def statistics(pixels: np.ndarray) -> np.ndarray:
    """NumPy's, of uint8 (samples, channels, height, width)."""
    unit = pixels / 255
    return np.stack([unit.mean((0, 2, 3)), unit.std((2, 3)).mean(0)])


def test_the_opening_exchange_pools_numpys_statistics() -> None:
    trainer = made()
    state, replies = trainer.method.initial_state(), []
    for index in (2, 0, 3):  # the order of replies is not that of the clients; one did not reply
        client = make_client(trainer, LABELS[: 20 + 16 * index], round=0, seed=index)
        sent = trainer.method.send(state, make_client_info(index, 3), 0)
        replies.append((make_client_info(index, 3), trainer.train(client, sent, {})))
        assert trainer.method.find_problem(sent, replies[-1][1], 0) is None
        np.testing.assert_allclose(replies[-1][1][STATISTICS], statistics(client.data.samples(slice(None))), atol=1e-6)
    after, _ = aggregate(trainer.method, state, replies, 0)
    by_index = {peer.index: reply[STATISTICS] for peer, reply in replies}
    assert torch.equal(after[POOL], torch.stack([by_index[0], by_index[2], by_index[3]]))
    torch.testing.assert_close(after[MEAN], after[POOL].mean(0))
    assert torch.equal(after["weights"], state["weights"])
    deployed = trainer.method.final_model(after).tensors
    assert torch.equal(deployed[MEAN], after[MEAN]) and POOL not in deployed
    assert set(trainer.method.send(after, make_client_info(0, 3), 1).tensors) == {"weights", "counters", POOL, MEAN}


def pool(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor([[[mean] * 3, [deviation] * 3] for mean, deviation in pairs])


def test_a_batch_is_normalised_with_a_mean_and_a_deviation_of_the_pool() -> None:
    trainer = made()
    means, deviations = (0.1, 0.3, 0.7), (0.2, 0.4, 0.8)
    found = set()
    tensors = trainer.method.initial_state() | {POOL: pool(*zip(means, deviations, strict=True))}
    for round in range(1, 40):
        client = make_client(trainer, LABELS[:4], round=round)
        step = first_step(trainer, start_round(trainer, client, Message(tensors)))
        unit = client.data.samples(step.rows.numpy()).astype(np.float32) / 255
        fitting = [
            (mean, deviation)
            for mean in means
            for deviation in deviations
            if np.allclose(step.images, (unit - mean) / deviation, atol=1e-4)
        ]
        assert len(fitting) == 1
        found.add(fitting[0])
    assert len(found) == 9  # each on its own: all pairs come


def test_draws_differ_from_batch_to_batch() -> None:
    trainer = made()
    tensors = trainer.method.initial_state() | {POOL: pool((0.1, 0.2), (0.5, 0.9))}
    client_round = start_round(trainer, make_client(trainer, LABELS), Message(tensors))
    part = next(part for part in trainer.method.active_parts if part.name == PART)
    seen = set()
    for batch in [*client_round.client.batches()] * 4:
        step = TrainStep(client_round, batch)
        plain = step.images.clone()
        part.transform_batch(step, client_round.round_states[PART])
        seen.add(round((step.images.std() / plain.std()).item(), 3))
    assert len(seen) == 2


def test_prediction_uses_the_mean_of_the_pool() -> None:
    trainer = made()
    state = trainer.method.initial_state()
    state |= {POOL: pool((0.2, 0.1), (0.4, 0.3)), MEAN: pool((0.3, 0.25))[0]}
    client = make_client(trainer, LABELS[:6])
    trainer.receive(trainer.method.final_model(state))
    unit = torch.from_numpy(client.data.samples(slice(None))).float() / 255
    trainer.model.eval()
    with torch.no_grad():
        expected = torch.sigmoid(trainer.model((unit - 0.3) / 0.25))
    torch.testing.assert_close(trainer.predict(client.data, 0, 6), expected, atol=1e-5, rtol=1e-4)
    client_round = start_round(trainer, client, trainer.method.send(state, make_client_info(0, 3), 1))
    client_round.image_transforms = trainer.method.parts_with("transform_images")
    torch.testing.assert_close(client_round.outputs().probabilities, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(client_round.outputs(features=True).probabilities, expected, atol=1e-5, rtol=1e-4)


def test_images_of_one_colour_do_not_divide_by_zero() -> None:
    trainer = made()
    tensors = trainer.method.initial_state() | {POOL: pool((0.5, 0.0))}
    step = first_step(trainer, start_round(trainer, make_client(trainer, LABELS[:4]), Message(tensors)))
    assert torch.isfinite(step.images).all() and step.images.abs().max() <= 0.5 / 1e-3 + 1


@pytest.mark.parametrize("pixels", [{}, {"model__pixel_mean": (0.4, 0.5, 0.6), "model__pixel_std": (0.2, 0.3, 0.4)}])
def test_pool_with_only_the_tasks_statistics_is_fedavg_bit_for_bit(pixels: dict[str, Any]) -> None:
    trainer = made(**pixels)
    plain = make_trainer(small(**pixels), shape=(3, 8, 8), clients=4)
    state = trainer.method.initial_state()
    assert state[POOL].shape == (1, 2, 3) and torch.equal(state[POOL][0], state[MEAN])
    sent = trainer.method.send(state, make_client_info(0, 3), 1)
    reply = trainer.train(make_client(trainer, LABELS), sent, {})
    other = plain.train(
        make_client(plain, LABELS), plain.method.send(plain.method.initial_state(), make_client_info(0, 3), 1), {}
    )
    assert torch.equal(reply["weights"], other["weights"])
    assert trainer.method.find_problem(sent, reply, 1) is None


def test_saved_model_gives_the_same_predictions(tmp_path: Path) -> None:
    result = run(
        small(method__name="fedrdn", data__limit=80, partition__clients=2, training__rounds=1), tmp_path / "run"
    )
    assert MEAN in result.weights
    images = np.random.default_rng(0).integers(0, 256, (5, *result.summary["sample_shape"]), dtype=np.uint8)
    loaded = load_run(tmp_path / "run")
    mean, deviation = result.weights[MEAN]
    model = loaded.trainer.model.eval()
    with torch.no_grad():
        expected = torch.sigmoid(model((torch.from_numpy(images).float() / 255 - mean) / deviation))
    np.testing.assert_allclose(loaded.predict(images), expected.numpy(), atol=1e-5)
    with torch.no_grad():
        plain = torch.sigmoid(model(loaded.trainer.task.preprocess(torch.from_numpy(images))))
    assert not np.allclose(loaded.predict(images), plain.numpy(), atol=1e-4)


def test_implausible_statistics_are_rejected() -> None:
    trainer = made()
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 0)
    reply = trainer.train(make_client(trainer, LABELS, round=0), sent, {})
    for value, good in ((0.0, True), (1.0, True), (-0.01, False), (1.01, False)):
        other = Message({STATISTICS: torch.full((2, 3), value)}, reply.numbers)
        assert (trainer.method.find_problem(sent, other, 0) is None) == good
    assert "(3, 2)" in str(trainer.method.find_problem(sent, Message({STATISTICS: torch.ones(3, 2)}, reply.numbers), 0))


def test_data_without_pixels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'features:x.npz' has feature vectors.*or another method"):
        small(method__name="fedrdn", data__name="features:x.npz")
    with pytest.raises(ConfigError, match=r"computed only once.*model\.freeze = 'none'"):
        small(method__name="fedrdn", model__freeze="backbone", model__weights="random")
    small(method__name="fedrdn", model__freeze=1, model__weights="random")
    with pytest.raises(ConfigError, match="decides the views of a batch that the network sees"):
        small().changed({"method": {"name": "compose", "parts": ["prior-adjusted", PART]}})


def test_a_wrong_shape_is_not_reported_as_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the part contains "norm": only the code of the problem decides."""
    monkeypatch.setattr(
        RandomNormalisation, "collect_statistics", lambda part, client_round: {"statistics": torch.ones(3, 2)}
    )
    with pytest.raises(ReplyRejected) as error:
        run(experiment(method__name="fedrdn"))
    assert "random-normalisation/statistics is torch.float32 (3, 2)" in str(error.value)
    assert "diverged" not in str(error.value)
