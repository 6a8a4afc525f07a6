"""FedC-Tran and FedLGT: masks and losses against NumPy, switches against the simpler method, known labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits, watched, word_vectors
from conftest import small
from scipy import stats

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.data.federation import build
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.local import LocalEngine
from fedmll.evaluation import metrics
from fedmll.methods import build_method
from fedmll.methods.fedctran import LabelMask, random_known
from fedmll.methods.fedlgt import ClientAwareMask, uncertain
from fedmll.methods.framework.client_round import Batch, ClientRound, TrainStep
from fedmll.methods.framework.task import task_of
from fedmll.testing import aggregate, make_client, start_round
from fedmll.training.round_loop import run


@pytest.fixture(scope="module")
def glove(tmp_path_factory: pytest.TempPathFactory) -> str:
    return word_vectors(tmp_path_factory.mktemp("glove"))


def lgt(encoder: str, **options: Any) -> Experiment:
    return small(**{"method__name": "fedlgt", "method__encoder": encoder} | options)


def one_step(experiment: Experiment, targets: np.ndarray, rows: list[int] | None = None) -> tuple[Trainer, TrainStep]:
    """All of a client's samples as one batch, or these; no part has shaped it yet."""
    trainer = Trainer(task_of(build(experiment)))
    client_round = start_round(trainer, make_client(trainer, targets))
    data, places = client_round.client.data, np.arange(len(targets)) if rows is None else np.array(rows)
    labels = torch.from_numpy(data.labels[places])
    batch = Batch(
        task=trainer.task,
        data=data,
        rows=torch.from_numpy(places),
        targets=labels,
        augmentation="none",
        generator=torch.Generator(),
    )
    return trainer, TrainStep(client_round, batch)


def mask_labels(trainer: Trainer, step: TrainStep, seed: int) -> torch.Tensor:
    """What label mask training tells the network."""
    trainer.method.part(LabelMask).transform_batch(step, (torch.Generator().manual_seed(seed), None))
    assert step.states is not None
    return step.states


# ---- label mask training


@pytest.mark.parametrize(("classes", "most"), [(20, 15), (10, 7), (3, 2), (1, 0)])
def test_label_mask_counts_are_uniform(classes: int, most: int) -> None:
    """n_known ~ UniformInt[0, ⌊0.75 C⌋], so 25–100 % are unknown; every label equally often."""
    known = random_known(20_000, classes, 0.75, torch.Generator().manual_seed(0)).numpy()
    counts = np.bincount(known.sum(1), minlength=most + 1)
    assert len(counts) == most + 1
    assert most == 0 or stats.chisquare(counts).pvalue > 1e-3
    if most:
        assert stats.chisquare(known.sum(0)).pvalue > 1e-3
        pair = (known[:, 0] & known[:, 1]).mean()  # E[n(n−1)] / (C(C−1)): drawn without replacement
        n = np.arange(most + 1)
        assert pair == pytest.approx((n * (n - 1)).mean() / (classes * (classes - 1)), abs=0.02)


def test_label_masks_come_from_the_generator() -> None:
    draws = [random_known(8, 10, 0.75, torch.Generator().manual_seed(seed)) for seed in (4, 4, 5)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


TARGETS = np.array([[1, 0, -1, 0, 0, 1, 0, 0, -1, 0], [0] * 10, [-1] * 10, [1] * 10], dtype=np.int8)


def test_states_are_targets_or_unknown() -> None:
    trainer, step = one_step(small(method__name="fedctran"), np.repeat(TARGETS, 50, axis=0))
    states, batch = mask_labels(trainer, step, 0), step.batch
    told = states >= 0
    assert torch.equal(states[told], batch.targets[told])
    assert (states[batch.targets < 0] == -1).all()
    assert 0.2 < told[batch.targets >= 0].float().mean() < 0.5  # ⌊7.5⌋/2 of 10


def test_loss_is_summed_over_what_is_unknown_to_the_model_and_annotated() -> None:
    trainer, step = one_step(small(method__name="fedctran"), TARGETS)
    states = torch.from_numpy(TARGETS).clone()
    hidden = np.random.default_rng(0).random(TARGETS.shape) < 0.5
    states[torch.from_numpy(hidden)] = -1
    step.states = states
    model = trainer.model.eval()
    with torch.no_grad():
        z = model(step.batch.images, states).double().numpy()
        found = trainer.loss(step).item()
    p = 1 / (1 + np.exp(-z))
    full = -np.where(TARGETS == 1, np.log(p), np.log(1 - p))
    counted = hidden & (TARGETS >= 0)
    assert counted.sum() > 5
    assert found == pytest.approx(full[counted].sum(), rel=1e-5)


def test_loss_is_finite_for_extreme_logits() -> None:
    trainer, step = one_step(small(method__name="fedctran"), TARGETS)
    model = trainer.model
    with torch.no_grad():
        model.bias.copy_(torch.tensor([100.0, -100.0] * 5))
    mask_labels(trainer, step, 0)
    loss = trainer.loss(step)
    loss.backward()
    assert torch.isfinite(loss)
    assert loss.item() > 50
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ---- CA-MLE


def test_uncertain_is_exactly_the_closed_interval() -> None:
    low, high = np.float32(0.48), np.float32(0.52)
    one, zero = np.float32(1), np.float32(0)
    p = np.array([np.nextafter(low, zero), low, 0.5, high, np.nextafter(high, one), 0.0, 1.0], dtype=np.float32)
    assert uncertain(torch.tensor(p), 0.5, 0.02).tolist() == [False, True, True, True, False, False, False]
    assert uncertain(torch.tensor([0.3, 0.5, 0.7]), 0.5, 0.0).tolist() == [False, True, False]


def test_ca_mle_hides_exactly_the_uncertain_entries(glove: str) -> None:
    hide = torch.from_numpy(np.random.default_rng(3).random((30, 10)) < 0.3)
    rows = [7, 2, 29, 11]
    targets = np.zeros((30, 10), dtype=np.int8)
    targets[rows] = TARGETS

    def states(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Before and after."""
        trainer, step = one_step(lgt(glove, **options), targets, rows)
        plain = mask_labels(trainer, step, 1).clone()
        trainer.method.part(ClientAwareMask).transform_batch(step, hide)
        return plain, step.states

    plain, found = states()
    expected = torch.where(hide[rows], torch.tensor(-1, dtype=torch.int8), plain)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)
    again, found = states(method__compat="first-sample")
    assert torch.equal(again, plain)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1:], plain[1:])


def test_the_teacher_is_the_global_model_and_predicts_once_a_round(
    glove: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(build(lgt(glove, training__local_epochs=3)), tmp_path)
    trainer, found = engine.trainer, []
    original = ClientAwareMask.on_round_start

    def prepare(self: ClientAwareMask, client_round: ClientRound) -> torch.Tensor:
        mask = original(self, client_round)
        found.append(client_round.outputs().probabilities)
        return mask

    monkeypatch.setattr(ClientAwareMask, "on_round_start", prepare)
    try:
        start, data = engine.initial_state(), engine.federation
        with watched(trainer.model) as looks:  # a step's features and logits are no pass through the whole
            replies = list(engine.collect_replies(start, 1))
        assert len(found) == len(replies) == 4
        assert sum(len(seen.images) for seen in looks) == data.sizes.sum()  # one pass a client, not one an epoch
        assert not any(seen.training for seen in looks)
        for (peer, _), p in zip(replies, found, strict=True):
            trainer.weights.load(start)
            trainer.model.eval()
            images = trainer.task.preprocess(
                torch.from_numpy(data.train.subset(data.samples[peer.index]).samples(slice(None)))
            )
            with torch.no_grad():
                unknown = torch.full((len(images), 10), -1, dtype=torch.int8)
                torch.testing.assert_close(p, torch.sigmoid(trainer.model(images, unknown)), atol=1e-5, rtol=0)
    finally:
        engine.close()


# ---- switches


def test_without_both_components_it_is_fedctran_bit_for_bit(glove: str) -> None:
    plain = run(small(method__name="fedctran")).weights
    assert same_bits(plain, run(lgt(glove, method__ule=False, method__ca_mle=False)).weights)
    assert same_bits(plain, run(lgt("learned", method__ca_mle=False)).weights)
    assert not same_bits(plain, run(lgt(glove, method__ca_mle=False)).weights)


def test_ca_mle_without_uncertain_labels_changes_nothing(glove: str) -> None:
    off, nothing, some, all_ = (
        run(lgt(glove, training__rounds=1, **change)).weights
        for change in ({"method__ca_mle": False}, {"method__eps": 0.0}, {"method__eps": 0.2}, {"method__eps": 0.5})
    )
    assert same_bits(off, nothing)
    assert not same_bits(off, some)
    assert not same_bits(some, all_)


def test_prompt_and_fine_names_change_the_embeddings(glove: str, tmp_path: Path) -> None:
    (tmp_path / "fine.json").write_text('{"nine": ["eight", "one"]}')
    fine = {"method__fine_names": str(tmp_path / "fine.json")}
    variants = [{}, {"method__prompt": "{class}"}, fine, fine | {"method__fine": "average"}]
    labels = [build_method(task_of(build(lgt(glove, **v)))).build_model().labels for v in variants]
    for i, a in enumerate(labels):
        assert not any(torch.equal(a, b) for b in labels[:i])
    assert torch.equal(labels[0][:9], labels[2][:9])  # only the class that has fine names


def test_frozen_embeddings_never_change_and_learned_ones_do(glove: str, tmp_path: Path) -> None:
    engine = LocalEngine(build(lgt(glove)), tmp_path)
    try:
        trainer = engine.trainer
        before = trainer.model.labels.clone(), trainer.model.states.clone()
        state = engine.initial_state()
        for number in (1, 2):
            state, _ = aggregate(engine.method, state, engine.collect_replies(state, number), number)
        trainer.receive(engine.method.final_model(state))
        assert torch.equal(trainer.model.labels, before[0])
        assert torch.equal(trainer.model.states, before[1])
        assert not {"labels", "states"} & set(trainer.weights.layout)
    finally:
        engine.close()
    start = build_method(task_of(build(small(method__name="fedctran")))).build_model()
    learned = run(small(method__name="fedctran", training__rounds=1)).weights
    assert not torch.equal(learned["labels"], start.labels)
    assert not torch.equal(learned["states"], start.states)


def test_a_prompt_without_a_place_for_the_class_is_refused(glove: str) -> None:
    with pytest.raises(ConfigError, match=r"write \{class\} there"):
        lgt(glove, method__prompt="The photo.")


def test_missing_encoder_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="The choices are: wordllama"):
        run(lgt("clip"))


def test_the_default_encoder_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wordllama", reason="pip install 'fedmll[hf]'")
    import socket

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("somebody wants the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    result = run(small(method__name="fedlgt", training__rounds=1))
    assert np.isfinite(result.metrics["macro_auc"])


@pytest.mark.parametrize("name", ["fedctran", "fedlgt"])
def test_works_with_missing_annotations_other_losses_and_workers(glove: str, name: str) -> None:
    values: dict[str, Any] = {"method__name": name, "annotation__kind": "missing", "annotation__missing": 4}
    values |= {"training__loss": "asl", "training__clip": 10.0, "training__rounds": 1}
    if name == "fedlgt":
        values["method__encoder"] = glove
    alone = run(small(**values))
    assert np.isfinite(alone.rows[0]["loss"])
    assert same_bits(alone.weights, run(small(**values, engine__workers=2)).weights)


# ---- labels that see each other through inducing tokens


def test_inducing_tokens_are_trained_and_averaged_with_every_worker_count(glove: str) -> None:
    values: dict[str, Any] = {"training__rounds": 1, "method__inducing": 4, "annotation__kind": "missing"}
    alone, two = (run(lgt(glove, **values, engine__workers=workers)).weights for workers in (0, 2))
    assert same_bits(alone, two)
    start = build_method(task_of(build(lgt(glove, **values)))).build_model().inducing
    assert alone["inducing"].shape == start.shape == (4, 8)
    assert ((alone["inducing"] - start).abs() > 1e-5).any(1).all()


@pytest.mark.parametrize("tokens", [10, 11])
def test_as_many_inducing_tokens_as_labels_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"inducing = {tokens} for 10 labels.*fewer than 10"):
        run(small(method__name="fedctran", method__inducing=tokens))


# ---- known labels


def test_known_labels_are_returned_and_unknown_ones_predicted() -> None:
    trainer, step = one_step(small(method__name="fedctran"), TARGETS)
    method, model, batch = trainer.method, trainer.model.eval(), step.batch
    with torch.no_grad():
        scores = method.predict(model, batch.images, batch.targets)
        nothing = method.predict(model, batch.images)
        told = batch.targets >= 0
        assert torch.equal(scores[told], batch.targets[told].float())
        open_ = ~told & told.any(1, keepdim=True)
        assert open_.any()
        assert not torch.isclose(scores[open_], nothing[open_], atol=1e-7).any()
        assert torch.equal(nothing, method.predict(model, batch.images, torch.full_like(batch.targets, -1)))


def test_known_labels_help_if_labels_are_correlated(tmp_path: Path) -> None:
    """Noise for images; label b is label a, c is the opposite of a. Only who is told a can know b and c."""
    rng = np.random.default_rng(0)
    a = rng.random(800) < 0.5
    y = np.stack([a, a, ~a], axis=1).astype(np.int8)
    x = rng.normal(size=(800, 4)).astype(np.float32)
    np.savez(tmp_path / "f.npz", x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:])
    experiment = small(
        method__name="fedctran", data__name=f"features:{tmp_path / 'f.npz'}", data__limit=500, method__layers=1,
        model__backbone="auto", model__channels=(16,), training__lr=0.01, training__rounds=4, partition__kind="iid",
        partition__clients=2, training__batch_size=32,
    )  # fmt: skip
    engine = LocalEngine(build(experiment), tmp_path / "memory")
    try:
        state = engine.initial_state()
        for number in range(1, 5):
            state, _ = aggregate(engine.method, state, engine.collect_replies(state, number), number)
        engine.trainer.receive(engine.method.final_model(state))
        model = engine.trainer.model.eval()
        test = engine.federation.test
        known = np.where([True, False, False], test.labels, np.int8(-1))
        hidden = np.where([True, False, False], np.int8(-1), test.labels)
        aps = []
        for given in (None, torch.from_numpy(known)):
            with torch.inference_mode():
                scores = engine.method.predict(model, torch.from_numpy(test.samples(slice(None))), given)
            aps.append(metrics.evaluate(scores.numpy(), hidden, test.classes).values["map"])
    finally:
        engine.close()
    assert aps[0] < 65
    assert aps[1] > 99
