"""docs/write-a-method.md: what it shows is what the example is, and all of it runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from fedmll import registry
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.testing import client_of, experiment, learner_of, merge, peer_of

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "fedmll-scaffold"
PAGE = (ROOT / "docs" / "write-a-method.md").read_text()
SMALL = [
    *("--clients", "3", "--workers", "2", "--set", "data.limit=120", "--set", "model.channels=[4,8]"),
    *("--set", "training.optimizer=sgd", "--set", "training.lr=0.1"),
]
C = "my-control-variates/c"
LR = 0.1


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def block(language: str, holds: str) -> str:
    (found,) = (text for text in blocks(language) if holds in text)
    return found


# ---- what is written


def test_the_page_shows_the_example_as_it_is() -> None:
    code = (EXAMPLE / "fedmll_scaffold.py").read_text()
    assert code in blocks("python")
    assert (EXAMPLE / "pyproject.toml").read_text() in blocks("toml")
    assert len(code.splitlines()) <= 35


# ---- what is installed


def fedmll(here: Path, *words: str, packages: Path | None = None) -> str:
    path = os.pathsep.join(map(str, filter(None, [ROOT / "src", packages])))
    said = subprocess.run(
        [sys.executable, "-m", "fedmll", *words],
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout + said.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip installed the page's package: the text of the page, not a file of the repository."""
    project, target = tmp_path_factory.mktemp("fedmll-scaffold"), tmp_path_factory.mktemp("site-packages")
    (project / "pyproject.toml").write_text(block("toml", "entry-points"))
    (project / "fedmll_scaffold.py").write_text(block("python", "class ControlVariates"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(project)], check=True, capture_output=True)
    return target


def test_the_package_runs_compares_and_resumes(packages: Path, tmp_path: Path) -> None:
    said = fedmll(tmp_path, "methods", "my-scaffold", packages=packages)
    assert "Karimireddy" in said and "my-control-variates" in said
    first = ["run", "--method", "my-scaffold", "--rounds", "2", "--out", "first"]
    assert "my-scaffold on ml-digits, round 2" in fedmll(tmp_path, *first, *SMALL, packages=packages)
    fedmll(tmp_path, "resume", "first", "--rounds", "3", packages=packages)
    both = ["compare", "--methods", "fedavg,my-scaffold", "--seeds", "0", "--rounds", "3", "--out", "both"]
    said = fedmll(tmp_path, *both, *SMALL, packages=packages)
    assert "fedavg" in said and "my-scaffold" in said and "failed" not in said
    resumed, whole, plain = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("first", "both/my-scaffold/seed-0", "both/fedavg/seed-0")
    )
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert not all(torch.equal(plain[name], whole[name]) for name in whole)


def test_the_file_of_other_doors_runs(tmp_path: Path) -> None:
    (tmp_path / "doors.py").write_text(block("python", '"my-focal"'))
    (line,) = (line for text in blocks("console") for line in text.splitlines() if "doors.py" in line)
    said = fedmll(tmp_path, *line.split()[1:], "--workers", "0")
    assert "fedavg on my-noise, round 1" in said and "my-exact" in said


# ---- what it computes


@pytest.fixture(scope="module")
def scaffold() -> Iterator[ModuleType]:
    """The example, imported; its names are gone again afterwards."""
    for kind in registry.BUILT_IN:
        registry.all_of(kind)
    spec = importlib.util.spec_from_file_location("fedmll_scaffold", EXAMPLE / "fedmll_scaffold.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_things", {kind: dict(things) for kind, things in registry._things.items()})
        patch.setattr(registry, "_homes", dict(registry._homes))
        patch.setitem(sys.modules, "fedmll_scaffold", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.usefixtures("scaffold")
def test_the_test_on_the_page_passes() -> None:
    names: dict[str, object] = {}
    exec(block("python", "def test_a_client_remembers"), names)
    names["test_a_client_remembers_its_mean_gradient_and_c_follows"]()  # type: ignore[operator]


def small(**overrides: object) -> Experiment:
    values = {"training__optimizer": "sgd", "training__lr": LR, "training__weight_decay": 0.0}
    return experiment(method__name="my-scaffold", **values | overrides)


def labels(client: int) -> np.ndarray:
    return np.random.default_rng(client).integers(0, 2, (32 + 16 * client, 3)).astype(np.int8)


def by_hand(learner: Learner, client: int, round: int, start: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """The parameters after the client's steps of plain SGD, every gradient + correction; written without the method."""
    learner.weights.vector.copy_(start)
    model, parameters = learner.model.train(), learner.weights.parameters
    for batch in client_of(learner, labels(client), round=round, name=f"c{client:03d}", seed=client).batches():
        loss = F.binary_cross_entropy_with_logits(model(batch.images), batch.targets.float())
        gradients = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
        with torch.no_grad():
            learner.weights.parameter_vector.sub_(LR * (gradients + correction))
    return learner.weights.parameter_vector.clone()


def a_round(learner: Learner, state: Tensors, round: int, memories: dict[int, Tensors]) -> dict[int, Message]:
    """The replies of the clients whose memories these are."""
    replies = {}
    for client, memory in memories.items():
        peer = peer_of(client, 3)
        here = client_of(learner, labels(client), round=round, name=peer.name, seed=client)
        replies[client] = learner.train(here, learner.method.send(state, peer, round), memory)
    return replies


@pytest.mark.usefixtures("scaffold")
def test_two_rounds_are_the_papers() -> None:
    learner = learner_of(small(), clients=2)
    method, end = learner.method, learner.weights.parameter_end
    state = method.start()
    memories: dict[int, Tensors] = {0: {}, 1: {}}
    steps = {client: len(labels(client)) // 16 for client in memories}
    assert not state[C].any()

    replies = a_round(learner, state, 1, memories)
    for client, reply in replies.items():
        trained = by_hand(learner, client, 1, state["weights"], torch.zeros(end))
        torch.testing.assert_close(reply["weights"][:end], trained)  # c = c_i = 0: FedAvg
        own = (state["weights"][:end] - trained) / (steps[client] * LR)
        torch.testing.assert_close(memories[client][C], own)
    c_i = {client: memory[C].clone() for client, memory in memories.items()}
    second, _ = merge(method, state, [(peer_of(client, 3), reply) for client, reply in replies.items()], 1)
    torch.testing.assert_close(second[C], (c_i[0] + c_i[1]) / 2)

    replies = a_round(learner, second, 2, memories)
    changes = {}
    for client, reply in replies.items():
        trained = by_hand(learner, client, 2, second["weights"], second[C] - c_i[client])
        torch.testing.assert_close(reply["weights"][:end], trained)
        uncorrected = by_hand(learner, client, 2, second["weights"], torch.zeros(end))
        assert (trained - uncorrected).abs().max() > 1e-3  # the correction is no rounding error
        new = c_i[client] - second[C] + (second["weights"][:end] - trained) / (steps[client] * LR)
        torch.testing.assert_close(memories[client][C], new, atol=1e-4, rtol=1e-4)
        changes[client] = new - c_i[client]
    third, _ = merge(method, second, [(peer_of(client, 3), reply) for client, reply in replies.items()], 2)
    torch.testing.assert_close(third[C], second[C] + (changes[0] + changes[1]) / 2, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("scaffold")
def test_who_does_not_take_part_counts_in_the_divisor() -> None:
    learner = learner_of(small(), clients=5)
    state = learner.method.start()
    replies = a_round(learner, state, 1, {0: {}, 1: {}})
    following, _ = merge(learner.method, state, [(peer_of(client, 3), reply) for client, reply in replies.items()], 1)
    torch.testing.assert_close(following[C], (replies[0][C] + replies[1][C]) / 5)


@pytest.mark.usefixtures("scaffold")
def test_a_reply_of_another_shape_is_refused() -> None:
    learner = learner_of(small())
    sent = learner.method.send(learner.method.start(), peer_of(0, 3), 1)
    reply = a_round(learner, learner.method.start(), 1, {0: {}})[0]
    assert learner.method.refuse(sent, reply, 1) is None
    short = Message(reply.tensors | {C: reply[C][1:]}, reply.numbers)
    assert C in (learner.method.refuse(sent, short, 1) or "")


# ---- the rest of the page


@pytest.mark.usefixtures("scaffold")
def test_a_part_with_options_and_a_range() -> None:
    exec(block("python", "class Rates"), {"__name__": "the_page"})
    weak, strong = (learner_of(experiment(method__name="my-rates", method__strength=s)) for s in (0.0, 10.0))
    with pytest.raises(ConfigError, match=r"method\.strength"):
        experiment(method__name="my-rates", method__strength=-1.0)
    state, peer = strong.method.start(), peer_of(0, 3)
    sent = strong.method.send(state, peer, 1)
    reply = strong.train(client_of(strong, labels(0)), sent, {})
    other = weak.train(client_of(weak, labels(0)), sent, {})
    assert not torch.equal(reply["weights"], other["weights"])
    assert strong.method.refuse(sent, reply, 1) is None
    following, _ = merge(strong.method, state, [(peer, reply), (peer, reply)], 1)
    torch.testing.assert_close(following["my-rates/rates"], torch.from_numpy((labels(0) == 1).mean(0)).float())
    lie = Message(reply.tensors | {"my-rates/counts": reply["my-rates/counts"].flip(0)}, reply.numbers)
    reason = strong.method.refuse(sent, lie, 1)
    assert reason == "my-rates/counts has more positives than known targets"
    assert reason in " ".join(PAGE.split())


@pytest.mark.usefixtures("scaffold")
def test_a_part_of_a_notebook_and_a_fusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "class Confident"), {"__name__": "a_notebook"})
    assert "compose on ml-digits, round 1" in capsys.readouterr().out
    file = tmp_path / "fusion.toml"
    file.write_text(block("toml", 'name = "compose"'))
    method = learner_of(Experiment.load(file)).method
    assert [part.name for part in method.list] == ["known", "proximal", "my-control-variates", "mean"]
    assert method.list[1].options.mu == 0.1
