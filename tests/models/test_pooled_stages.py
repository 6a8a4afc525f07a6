"""Features of several stages, their square root and the average over the flip: exact, cached and the same in
prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmll import load_run, register, run
from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.models.backbones import Backbone
from fedmll.models.backbones.convolutional import ConvNet, DenseNet, MobileNetV2, ResNet18
from fedmll.models.pooled_stages import PooledStages
from fedmll.testing import experiment

FROZEN: dict[str, Any] = {"model__freeze": "backbone", "model__weights": "random", "model__channels": (6, 8, 10)}
X: dict[str, Any] = {"model__stages": (1, 0), "model__power": "sqrt", "model__flip_average": True}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("backbone", "stages"),
    [
        (ConvNet(3, 32, (4, 6, 8), "batch"), (1, 0)),
        (ResNet18(3, 32, "cifar", "batch"), (3, 0)),
        (DenseNet(3, "batch", (2, 2, 2), 4, 8), (2, 0)),
        (MobileNetV2(3, "batch"), (17, 16, 13)),
    ],
    ids=["convnet", "resnet18", "densenet", "mobilenet-v2"],
)
def test_features_are_means_of_the_outputs_of_the_stages(backbone: Backbone, stages: tuple[int, ...]) -> None:
    """The outputs are those of the modules, as hooks see them."""
    backbone.eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    seen: dict[int, Tensor] = {}
    for number in stages:
        stage: Any = backbone.stages()[number]
        if isinstance(stage, nn.ModuleList):  # modules that forward() calls: the last one ends the stage
            stage = backbone.maxpool if isinstance(backbone, ResNet18) else stage[-1]
            stage = backbone.features.pool0 if isinstance(backbone, DenseNet) and number == 0 else stage
        stage.register_forward_hook(lambda m, a, output, number=number: seen.update({number: output.clone()}))
    with torch.no_grad():
        last = backbone(images).mean((2, 3))
        expected = torch.cat([last.sign() * last.abs().sqrt(), *(seen[number].mean((2, 3)) for number in stages)], 1)
        found = PooledStages(stages, "sqrt").features(backbone, images)
        torch.testing.assert_close(found, expected)
        seen.clear()
        flipped = PooledStages(stages, "sqrt").features(backbone, images.flip(3))
        both = PooledStages(stages, "sqrt", flip_average=True).features(backbone, images)
    torch.testing.assert_close(both, (found + flipped) / 2)
    assert not torch.allclose(found, flipped)


def test_mobilenet_has_the_features_of_the_documentation() -> None:
    pooling = PooledStages((17, 16, 13), "sqrt", flip_average=True)
    assert pooling.width(MobileNetV2(3, "batch"), (3, 32, 32)) == 1280 + 320 + 160 + 96


def test_vit_gives_the_outputs_of_its_layers() -> None:
    pytest.importorskip("transformers")
    from fedmll.models.backbones.vit import small_vit

    backbone = small_vit((3, 16, 16), (32, 32, 32)).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = backbone.stage_outputs(images, frozenset({0, 2}))
        torch.testing.assert_close(found[-1], backbone(images))
    assert found[0].shape == found[2].shape == found[-1].shape and set(found) == {0, 2, -1}


@pytest.mark.parametrize("method", ["fedavg", "fed-ridge", "private-fedavg", "spherefed", "fednca-ml"])
def test_every_head_that_uses_means_gets_them_in_training_and_prediction(
    cache: Path, method: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "private-fedavg": {"method__loss": "sigmoid"},
        "spherefed": {"model__width": 12},
        "fednca-ml": {"method__ladm": False, "method__etf": False},
    }.get(method, {})
    made = experiment(**FROZEN, **X, method__name=method, **options)
    data = federation.build(made)
    result = run(made, tmp_path / "run", prepared=data)
    assert result.weights["backbone.standardise.mean"].shape == (10 + 8 + 6,)
    saved = load_run(tmp_path / "run")
    from_images = saved.predict(data.test.samples(slice(None)))
    stored = saved.trainer.with_frozen_features(data)
    assert stored.test.tokens.shape[2:] == (24,)
    np.testing.assert_allclose(from_images, saved.predict(stored.test), atol=1e-4)
    two = run(made.changed({"engine.workers": 2}))
    assert all(torch.equal(tensor, two.weights[name]) for name, tensor in result.weights.items())


def test_heads_on_tokens_keep_the_tokens_of_the_last_stage(cache: Path) -> None:
    made = experiment(**FROZEN | {"model__channels": (6, 8, 12)}, method__name="fednca-ml")
    plain, asked = run(made).weights, run(made.changed({k.replace("__", "."): v for k, v in X.items()})).weights
    assert all(torch.equal(tensor, asked[name]) for name, tensor in plain.items())


def test_cached_features_depend_on_the_options(cache: Path) -> None:
    widths = set()
    for changes in ({}, X, {"model__power": "sqrt"}, {"model__flip_average": True}, {"model__stages": (1,)}):
        data = federation.build(experiment(**FROZEN, **changes))
        tokens = Trainer(task_of(data)).with_frozen_features(data).test.tokens
        widths.add((tokens.shape[2], float(np.asarray(tokens, dtype=np.float64).sum())))
    assert len(widths) == 5


def test_wrong_settings_are_refused() -> None:
    for changes in X:
        with pytest.raises(ConfigError, match=r"are for images and model\.freeze = 'backbone'"):
            experiment(**{changes: X[changes]})
    with pytest.raises(ConfigError, match=r"model\.stages has 2, and the stages of convnet before its last are 0 to 1"):
        run(experiment(**FROZEN, model__stages=(2,)))


class Flat(Backbone):
    """A plug-in's backbone without outputs of stages."""

    width: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images))


@register("backbone", "test-flat")
def flat(model: ModelSettings, shape: tuple[int, ...]) -> Flat:
    return Flat()


def test_backbone_without_stages_is_refused_by_name(cache: Path) -> None:
    own = FROZEN | {"model__backbone": "test-flat"}
    with pytest.raises(ConfigError, match="the backbone Flat does not give the outputs of its stages"):
        run(experiment(**own, model__stages=(0,)))
    run(experiment(**own, model__power="sqrt", model__flip_average=True))  # these need no stages


def test_auto_is_the_measured_choice_and_explicit_values_win() -> None:
    frozen: dict[str, Any] = {"model__freeze": "backbone", "model__weights": "random"}

    def features(**changes: Any) -> tuple[Any, ...]:
        model = experiment(**changes).model
        return model.stages, model.power, model.flip_average

    mobilenet = frozen | {"model__backbone": "mobilenet-v2"}
    assert features(**mobilenet) == ((17, 16, 13), "sqrt", True)
    assert features(**mobilenet, model__stages=()) == ((), "sqrt", True)
    assert features(**mobilenet, model__power="none", model__flip_average=False) == ((17, 16, 13), "none", False)
    assert features(**frozen) == ((), "none", False)  # the convnet of the tests was not measured
    assert features(model__backbone="mobilenet-v2") == ((), "none", False)  # it is trained
    stored = experiment(**mobilenet)
    assert stored.changed({}).model == stored.model == type(stored).make(stored.model_dump(exclude_none=True)).model
