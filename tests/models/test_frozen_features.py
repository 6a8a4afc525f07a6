"""A frozen backbone: what it keeps, what is sent, and that nothing but the arithmetic's place changes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmll import load_run, resume, run
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.engines import client_trainer
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation import metrics
from fedmll.methods.framework.base import Head, Part
from fedmll.methods.framework.client_round import TrainStep
from fedmll.methods.framework.task import task_of
from fedmll.models.backbones import Backbone
from fedmll.models.flat_weights import FlatWeights, sketch_frozen_tensors
from fedmll.models.network import Classifier
from fedmll.testing import experiment, make_trainer
from fedmll.training.callbacks import Callback

FROZEN: dict[str, Any] = {"model__freeze": "backbone", "model__weights": "random", "model__channels": (6, 10)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def learner_with_data(**changes: Any) -> tuple[Trainer, Any]:
    data = federation.build(experiment(**FROZEN | changes))
    trainer = Trainer(task_of(data))
    return trainer, trainer.with_frozen_features(data)


ATTENDING = {"method__name": "fednca-ml", "model__channels": (6, 16)}  # its head sees every token


def test_stored_tokens_equal_the_network_s_up_to_fp16_rounding(cache: Path) -> None:
    trainer, data = learner_with_data(**ATTENDING)
    backbone = trainer.model.backbone.eval()
    images = trainer.task.preprocess(torch.from_numpy(data.test.samples(slice(0, 40))))
    with torch.no_grad():
        exact = backbone(images)
    kept = torch.from_numpy(data.test.frozen_features(slice(0, 40)))
    assert kept.dtype == torch.float16
    torch.testing.assert_close(kept.float(), exact, atol=2e-3, rtol=1e-3)
    with torch.no_grad():  # and a network that sees the images themselves agrees with one that sees tokens
        torch.testing.assert_close(trainer.model(images), trainer.model(kept), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "means"),
    [
        ({}, True),
        ({"method__name": "fednca-ml", "method__ladm": False, "method__etf": False, "model__channels": (6, 16)}, True),
        ({"model__views": 3, "training__augment": "crop-flip"}, True),
        ({"model__width": 8}, False),  # the neck comes before the mean
        (ATTENDING, False),
    ],
)
def test_only_means_are_stored_if_the_head_uses_means(
    cache: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], means: bool
) -> None:
    """With the bits that the head makes of the tokens, so that nothing else changes."""
    trainer, data = learner_with_data(**changes)
    found = data.train.tokens
    assert (found.ndim, found.dtype) == ((3, np.float32) if means else (5, np.float16))
    assert trainer.model.backbone.stores_means == means
    trained = run(experiment(**FROZEN | changes)).weights
    original = client_trainer.FrozenFeatures
    monkeypatch.setattr(client_trainer, "FrozenFeatures", lambda *, means, **k: original(means=False, **k))
    whole, tokens = learner_with_data(**changes)
    assert tokens.train.tokens.ndim == 5
    batches = [
        torch.cat(
            [part.model.features(trainer.task.model_inputs(part_data.test, slice(s, s + 7))) for s in range(0, 70, 7)]
        )
        for part, part_data in ((trainer, data), (whole, tokens))
    ]
    assert torch.equal(*batches)
    for name, tensor in run(experiment(**FROZEN | changes)).weights.items():
        assert torch.equal(tensor, trained[name]), name


class Max(Classifier):
    """A linear head on the largest token."""

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        return self.tokens(images).amax((2, 3))


class MaxHead(Head):
    name: ClassVar[str] = "test-max"

    def build(self, backbone: Backbone) -> Max:
        return Max(backbone, len(self.task.classes))


class Looking(Part):
    """Looks at tokens beside a head that pools them."""

    name: ClassVar[str] = "test-looking"

    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        return step.client_round.model.tokens(step.images).square().mean()


def test_custom_head_gets_tokens(cache: Path, tmp_path: Path) -> None:
    """And a run's metrics are those of the model that it leaves, on images."""
    made = FROZEN | {"method__name": "compose", "method__head": "test-max", "training__lr": 0.05}
    assert learner_with_data(**made)[1].train.tokens.ndim == 5
    result = run(experiment(**made), tmp_path / "run")
    data = federation.build(experiment(**made))
    scores = load_run(tmp_path / "run").predict(data.test)
    found = metrics.evaluate(scores, data.test.labels, data.test.classes).values["macro_auc"]
    assert found == pytest.approx(result.metrics["macro_auc"], abs=0.05)


def test_using_tokens_where_only_means_are_stored_is_an_error(cache: Path) -> None:
    made = FROZEN | {"method__name": "compose", "method__parts": ("unknown-as-negative", "test-looking")}
    with pytest.raises(
        ConfigError, match=r"Only the means of the frozen backbone's tokens were stored.* its own features\(\)"
    ):
        run(experiment(**made))


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "fedavg-pl", "fednca-ml", "fedctran", "fedmlp", "fedharmony", "private-fedavg"]
)
def test_every_method_trains_heads_on_tokens_with_any_number_of_workers(cache: Path, method: str) -> None:
    options = {"method__loss": "sigmoid"} if method == "private-fedavg" else {}
    made = experiment(**FROZEN, method__name=method, **options, model__width=12)
    cold, warm = run(made.changed({"engine.workers": 2})), run(made)
    assert cold.weights.keys() == warm.weights.keys()
    assert all(torch.equal(cold.weights[name], warm.weights[name]) for name in warm.weights)
    assert not any(name.startswith("backbone.blocks") for name in warm.weights)  # never sent, never averaged
    assert any(name.startswith("backbone.neck") for name in warm.weights)


def test_frozen_batch_statistics_stay(cache: Path) -> None:
    trainer, _ = learner_with_data(model__width=12)
    norm = next(m for m in trainer.model.backbone.blocks.modules() if isinstance(m, nn.BatchNorm2d))
    trainer.model.train()
    assert not norm.training and trainer.model.backbone.neck.training
    assert set(FlatWeights(trainer.model).layout) == {
        "backbone.neck.0.weight", "backbone.neck.1.weight", "backbone.neck.1.bias", "head.weight", "head.bias",
        "backbone.neck.1.running_mean", "backbone.neck.1.running_var",
        "backbone.standardise.mean", "backbone.standardise.scale",
    }  # fmt: skip
    before = sketch_frozen_tensors(trainer.model)
    assert any("running_mean" in name for name in before)  # a site with other statistics is noticed
    norm.running_mean += 1
    assert sketch_frozen_tensors(trainer.model) != before


def test_training_on_tokens_is_training_through_the_frozen_network(cache: Path) -> None:
    """The same rounds with the backbone in the graph, by hand: plain SGD on images, no kept tokens."""
    made = experiment(**FROZEN, training__optimizer="sgd", training__lr=0.1, training__weight_decay=0.0)
    result = run(made)
    data = federation.build(made)
    trainer = Trainer(task_of(data))  # no tokens here
    method = trainer.method
    state = method.initial_state()
    for number in (0, 1, 2):  # 0: the statistics of the features
        merger = method.aggregator(state, number)
        for index in trainer.participants(data, number):
            peer = trainer.client_infos(data)[index]
            merger.add(
                peer, trainer.train(trainer.client_in_round(data, peer, number), method.send(state, peer, number), {})
            )
        state, _ = merger.result()
    found = trainer.named(method.final_model(state))
    for name in result.weights:
        torch.testing.assert_close(found[name], result.weights[name], atol=2e-4, rtol=1e-3)


def test_views_are_augmented_once_and_drawn_for_each_sample(cache: Path) -> None:
    trainer, data = learner_with_data(model__views=3, training__augment="crop-flip")
    tokens = data.train.tokens
    assert tokens.shape[:2] == (3, len(data.train.store))
    assert not np.array_equal(tokens[0], tokens[1]) and not np.array_equal(tokens[1], tokens[2])
    client = trainer.client_in_round(data, trainer.client_infos(data)[0], 1)
    batch = next(iter(client.batches()))
    shown = batch.images.numpy()
    rows = client.data.rows[batch.rows.numpy()]
    drawn = [
        {view for view in range(3) if np.array_equal(tokens[view, row], image)}
        for row, image in zip(rows, shown, strict=True)
    ]
    assert all(drawn) and len(set.union(*drawn)) == 3
    plain = next(client.evaluation_batches()).images.numpy()
    assert np.array_equal(plain, client.data.frozen_features(slice(0, len(plain))))


def test_cache_is_reused_only_for_the_same_weights(cache: Path) -> None:
    seen: list[str] = []
    data = federation.build(experiment(**FROZEN))
    trainer = Trainer(task_of(data))
    trainer.with_frozen_features(data, lambda done, total, what: seen.append(what))
    assert "computing features" in seen
    seen.clear()
    trainer.with_frozen_features(data, lambda done, total, what: seen.append(what))
    assert not seen
    other = Trainer(task_of(federation.build(experiment(**FROZEN, seed=1))))
    other.with_frozen_features(data, lambda done, total, what: seen.append(what))
    assert "computing features" in seen


def test_changed_code_does_not_use_old_features(cache: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "net.py"
    text = """
from fedmll import register
from fedmll.models.backbones.convolutional import ConvNet

class Net(ConvNet):
    def forward(self, images):
        return super().forward(images) * FACTOR

@register("backbone", "test-net")
def net(model, shape):
    return Net(shape[0], shape[1], (4, 8), "batch")
"""
    losses = []
    for factor in ("1.0", "0.0"):
        plugin.write_text(text.replace("FACTOR", factor))
        made = experiment(plugins=[str(plugin)], model__backbone="test-net", model__freeze="backbone")
        losses.append(run(made).rows[-1]["loss"])
    assert losses[0] != losses[1]


def test_killed_process_leaves_no_wrong_cache(cache: Path, tmp_path: Path) -> None:
    made = experiment(**FROZEN | {"model__channels": (64, 96)}, data__limit=None)
    file = tmp_path / "e.toml"
    file.write_text(made.to_toml())
    command = [sys.executable, "-m", "fedmll", "run", str(file), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, env=os.environ | {"FEDMLL_CACHE": str(cache)}, start_new_session=True)
    while process.poll() is None and not list(cache.glob(".*.tmp")):
        time.sleep(0.01)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    expected = run(made.changed({"training.rounds": 1}))
    subprocess.run([*command[:-1], str(tmp_path / "again")], check=True, env=os.environ | {"FEDMLL_CACHE": str(cache)})
    assert resume(tmp_path / "again").rows[1]["loss"] == expected.rows[1]["loss"]


class Killed(Exception):
    pass


class Killing(Callback):
    """Stops a run after its first round, as a kill does."""

    def on_round_end(self, row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise Killed


@pytest.mark.parametrize("warm", [True, False])
def test_a_resumed_run_has_the_same_bits_with_a_warm_and_a_cold_cache(cache: Path, tmp_path: Path, warm: bool) -> None:
    made = experiment(**FROZEN, model__width=12, model__views=2, training__augment="flip")
    whole = run(made)
    with pytest.raises(Killed):
        run(made, tmp_path / "run", callback=Killing())
    if not warm:
        shutil.rmtree(cache)
    resumed = resume(tmp_path / "run", engine={"workers": 2})
    assert [row["round"] for row in resumed.rows] == [0, 1, 2]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize("changes", [{}, ATTENDING])
def test_incomplete_cache_of_a_killed_process_is_not_used(cache: Path, changes: dict[str, Any]) -> None:
    """A half-filled file of another process, and one that a failing disk cut short; of means, and of tokens."""
    _, data = learner_with_data(**changes)
    expected = np.array(data.train.tokens)
    (kept,) = [path for path in cache.glob("*.npy") if np.load(path, mmap_mode="r").shape == expected.shape]
    whole = kept.read_bytes()
    kept.unlink()
    leftover = cache / f".{kept.name}.1-x.tmp"
    leftover.write_bytes(whole[: len(whole) // 2])
    np.testing.assert_array_equal(learner_with_data(**changes)[1].train.tokens, expected)
    assert not leftover.exists()
    kept.write_bytes(whole[:-100])
    np.testing.assert_array_equal(learner_with_data(**changes)[1].train.tokens, expected)


def test_a_finished_run_predicts_from_images(cache: Path, tmp_path: Path) -> None:
    made = experiment(**FROZEN, model__width=12)
    data = federation.build(made)
    run(made, tmp_path / "run", prepared=data)
    saved = load_run(tmp_path / "run")
    from_images = saved.predict(data.test.samples(slice(None)))
    engine_data = saved.trainer.with_frozen_features(data)
    from_tokens = saved.predict(engine_data.test)
    np.testing.assert_allclose(from_images, from_tokens, atol=1e-5)


def test_freezing_only_the_first_stages(cache: Path) -> None:
    result = run(experiment(model__freeze=1, model__weights="random", model__channels=(6, 10)))
    trained = {name.split(".")[2] for name in result.weights if name.startswith("backbone.blocks")}
    assert trained == {"1"}
    with pytest.raises(ConfigError, match="has 2 stages"):
        run(experiment(model__freeze=3, model__weights="random", model__channels=(6, 10)))


def test_frozen_backbone_without_weights_is_refused_unless_random_is_asked_for(fedmll: Any, tmp_path: Path) -> None:
    settings = ["training.rounds=1", "partition.clients=3", "data.limit=60", "model.channels=[6, 10]"]
    options = [word for setting in settings for word in ("--set", setting)]
    for freeze in ("backbone", "1"):
        code, _, error = fedmll("run", "--out", "refused", *options, "--set", f"model.freeze={freeze}")
        assert code == 2 and "the features of an untrained convnet are noise" in error
        assert "model.weights = 'random'" in error and not (tmp_path / "refused").exists()
    random = ("--set", "model.freeze=backbone", "--set", "model.weights=random")
    code, _, error = fedmll("run", "--out", "random", *options, *random)
    assert code == 0, error
    frozen = load_run(tmp_path / "random")
    unfrozen = frozen.experiment.changed({"model.freeze": "none", "model.weights": None, "model.standardise": "auto"})
    untrained = make_trainer(unfrozen, frozen.model.classes, frozen.model.sample_shape)
    for name, tensor in untrained.model.backbone.state_dict().items():  # the weights that every run starts with
        assert torch.equal(frozen.model.weights[f"backbone.{name}"], tensor), name


def test_settings_without_effect_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model\.views"):
        experiment(model__views=3)
    with pytest.raises(ConfigError, match=r"training\.augment"):
        experiment(**FROZEN, model__views=3)
    with pytest.raises(ConfigError, match=r"model\.views"):
        experiment(**FROZEN, training__augment="flip")
    with pytest.raises(ConfigError, match="less than or equal to 8"):
        experiment(**FROZEN, model__views=9, training__augment="flip")
