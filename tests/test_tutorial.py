"""docs/how-to/write-a-method.md: the page shows the example as it is, and all of its code runs."""

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

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.engines.client_trainer import Trainer
from fedmll.testing import aggregate, experiment, make_client, make_client_info, make_trainer

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "fedmll-scaffold"
PAGE = (ROOT / "docs" / "how-to" / "write-a-method.md").read_text()
SMALL = [
    *("--clients", "3", "--workers", "2", "--set", "data.limit=120", "--set", "model.channels=[4,8]"),
    *("--set", "training.optimizer=sgd", "--set", "training.lr=0.1"),
]
C = "my-control-variates/c"
LR = 0.1


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def code_block(language: str, contains: str) -> str:
    (found,) = (text for text in code_blocks(language) if contains in text)
    return found


# ---- the page


def test_the_page_shows_the_example_as_it_is() -> None:
    code = (EXAMPLE / "fedmll_scaffold.py").read_text()
    assert code in code_blocks("python")
    assert (EXAMPLE / "pyproject.toml").read_text() in code_blocks("toml")
    assert len(code.splitlines()) <= 34


# ---- the installed package


def run_fedmll(folder: Path, *words: str, packages: Path | None = None) -> str:
    path = os.pathsep.join(map(str, filter(None, [ROOT / "src", packages])))
    done = subprocess.run(
        [sys.executable, "-m", "fedmll", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the package of the page: its text, not a file of the repository."""
    project, target = tmp_path_factory.mktemp("fedmll-scaffold"), tmp_path_factory.mktemp("site-packages")
    (project / "pyproject.toml").write_text(code_block("toml", "entry-points"))
    (project / "fedmll_scaffold.py").write_text(code_block("python", "class ControlVariates"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(project)], check=True, capture_output=True)
    return target


def test_the_package_runs_compares_and_resumes(packages: Path, tmp_path: Path) -> None:
    printed = run_fedmll(tmp_path, "methods", "my-scaffold", packages=packages)
    assert "Karimireddy" in printed and "my-control-variates" in printed
    first = ["run", "--method", "my-scaffold", "--rounds", "2", "--out", "first"]
    assert "my-scaffold on ml-digits, round 2" in run_fedmll(tmp_path, *first, *SMALL, packages=packages)
    run_fedmll(tmp_path, "resume", "first", "--rounds", "3", packages=packages)
    both = ["compare", "--methods", "fedavg,my-scaffold", "--seeds", "0", "--rounds", "3", "--out", "both"]
    printed = run_fedmll(tmp_path, *both, *SMALL, packages=packages)
    assert "fedavg" in printed and "my-scaffold" in printed and "failed" not in printed
    resumed, uninterrupted, fedavg = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("first", "both/my-scaffold/seed-0", "both/fedavg/seed-0")
    )
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
    assert not all(torch.equal(fedavg[name], uninterrupted[name]) for name in uninterrupted)


def test_the_file_of_other_plugins_runs(tmp_path: Path) -> None:
    (tmp_path / "plugins.py").write_text(code_block("python", '"my-focal"'))
    (line,) = (line for text in code_blocks("console") for line in text.splitlines() if "plugins.py" in line)
    printed = run_fedmll(tmp_path, *line.split()[1:], "--workers", "0")
    assert "fedavg on my-noise, round 1" in printed and "my-exact" in printed


def test_the_page_about_metrics_has_the_same_metric() -> None:
    page = (ROOT / "docs" / "how-to" / "add-a-metric.md").read_text()
    (metric,) = re.findall(r"(def exact\(.*?)(?:```)", page, re.DOTALL)
    assert metric in code_block("python", '"my-exact"')


# ---- what it computes


@pytest.fixture(scope="module")
def scaffold() -> Iterator[ModuleType]:
    """The example, imported. Its names are removed from the registry afterwards."""
    for kind in registry.BUILT_IN:
        registry.all_of(kind)
    spec = importlib.util.spec_from_file_location("fedmll_scaffold", EXAMPLE / "fedmll_scaffold.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", {kind: dict(things) for kind, things in registry._registered.items()})
        patch.setattr(registry, "_modules", dict(registry._modules))
        patch.setitem(sys.modules, "fedmll_scaffold", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.usefixtures("scaffold")
def test_the_test_on_the_page_passes() -> None:
    names: dict[str, object] = {}
    exec(code_block("python", "def test_a_client_stores"), names)
    names["test_a_client_stores_its_mean_gradient_and_c_follows"]()  # type: ignore[operator]


def scaffold_experiment() -> Experiment:
    values = {"training__optimizer": "sgd", "training__lr": LR, "training__weight_decay": 0.0}
    return experiment(method__name="my-scaffold", **values)


def labels(client: int) -> np.ndarray:
    return np.random.default_rng(client).integers(0, 2, (32 + 16 * client, 3)).astype(np.int8)


def train_by_hand(
    trainer: Trainer, client: int, round: int, start: torch.Tensor, correction: torch.Tensor
) -> torch.Tensor:
    """The parameters after the client's steps of plain SGD, every gradient + correction; written without the method."""
    trainer.weights.vector.copy_(start)
    model, parameters = trainer.model.train(), trainer.weights.parameters
    for batch in make_client(trainer, labels(client), round=round, name=f"c{client:03d}", seed=client).batches():
        loss = F.binary_cross_entropy_with_logits(model(batch.images), batch.targets.float())
        gradients = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
        with torch.no_grad():
            trainer.weights.parameter_vector.sub_(LR * (gradients + correction))
    return trainer.weights.parameter_vector.clone()


def train_round(trainer: Trainer, state: Tensors, round: int, client_states: dict[int, Tensors]) -> dict[int, Message]:
    """The replies of the clients with these client states."""
    replies = {}
    for index, client_state in client_states.items():
        info = make_client_info(index, 3)
        client = make_client(trainer, labels(index), round=round, name=info.name, seed=index)
        replies[index] = trainer.train(client, trainer.method.send(state, info, round), client_state)
    return replies


def aggregate_replies(trainer: Trainer, state: Tensors, replies: dict[int, Message], round: int) -> Tensors:
    pairs = [(make_client_info(index, 3), reply) for index, reply in replies.items()]
    return aggregate(trainer.method, state, pairs, round)[0]


@pytest.mark.usefixtures("scaffold")
def test_two_rounds_are_those_of_the_paper() -> None:
    trainer = make_trainer(scaffold_experiment(), clients=2)
    end = trainer.weights.parameter_end
    state = trainer.method.initial_state()
    client_states: dict[int, Tensors] = {0: {}, 1: {}}
    steps = {client: len(labels(client)) // 16 for client in client_states}
    assert not state[C].any()

    replies = train_round(trainer, state, 1, client_states)
    for client, reply in replies.items():
        trained = train_by_hand(trainer, client, 1, state["weights"], torch.zeros(end))
        torch.testing.assert_close(reply["weights"][:end], trained)  # c = c_i = 0: FedAvg
        mean_gradient = (state["weights"][:end] - trained) / (steps[client] * LR)
        torch.testing.assert_close(client_states[client][C], mean_gradient)
    c_i = {client: client_state[C].clone() for client, client_state in client_states.items()}
    second = aggregate_replies(trainer, state, replies, 1)
    torch.testing.assert_close(second[C], (c_i[0] + c_i[1]) / 2)

    replies = train_round(trainer, second, 2, client_states)
    changes = {}
    for client, reply in replies.items():
        trained = train_by_hand(trainer, client, 2, second["weights"], second[C] - c_i[client])
        torch.testing.assert_close(reply["weights"][:end], trained)
        uncorrected = train_by_hand(trainer, client, 2, second["weights"], torch.zeros(end))
        assert (trained - uncorrected).abs().max() > 1e-3  # the correction is larger than rounding errors
        new = c_i[client] - second[C] + (second["weights"][:end] - trained) / (steps[client] * LR)
        torch.testing.assert_close(client_states[client][C], new, atol=1e-4, rtol=1e-4)
        changes[client] = new - c_i[client]
    third = aggregate_replies(trainer, second, replies, 2)
    torch.testing.assert_close(third[C], second[C] + (changes[0] + changes[1]) / 2, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("scaffold")
def test_clients_that_do_not_take_part_count_in_the_divisor() -> None:
    trainer = make_trainer(scaffold_experiment(), clients=5)
    state = trainer.method.initial_state()
    replies = train_round(trainer, state, 1, {0: {}, 1: {}})
    following = aggregate_replies(trainer, state, replies, 1)
    torch.testing.assert_close(following[C], (replies[0][C] + replies[1][C]) / 5)


@pytest.mark.usefixtures("scaffold")
def test_a_reply_of_another_shape_is_rejected() -> None:
    trainer = make_trainer(scaffold_experiment())
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 3), 1)
    reply = train_round(trainer, state, 1, {0: {}})[0]
    assert trainer.method.find_problem(sent, reply, 1) is None
    short = Message(reply.tensors | {C: reply[C][1:]}, reply.numbers)
    assert C in str(trainer.method.find_problem(sent, short, 1))


# ---- the rest of the page


@pytest.mark.usefixtures("scaffold")
def test_a_part_with_options_and_a_reply_specification() -> None:
    exec(code_block("python", "class Rates"), {"__name__": "the_page"})
    weak, strong = (make_trainer(experiment(method__name="my-rates", method__strength=s)) for s in (0.0, 10.0))
    with pytest.raises(ConfigError, match=r"method\.strength"):
        experiment(method__name="my-rates", method__strength=-1.0)
    state, info = strong.method.initial_state(), make_client_info(0, 3)
    sent = strong.method.send(state, info, 1)
    reply = strong.train(make_client(strong, labels(0)), sent, {})
    other = weak.train(make_client(weak, labels(0)), sent, {})
    assert not torch.equal(reply["weights"], other["weights"])
    assert strong.method.find_problem(sent, reply, 1) is None
    following, _ = aggregate(strong.method, state, [(info, reply), (info, reply)], 1)
    torch.testing.assert_close(following["my-rates/rates"], torch.from_numpy((labels(0) == 1).mean(0)).float())
    false = Message(reply.tensors | {"my-rates/counts": reply["my-rates/counts"].flip(0)}, reply.numbers)
    problem = str(strong.method.find_problem(sent, false, 1))
    assert problem == "my-rates/counts has more positives than known targets"
    assert problem in " ".join(PAGE.split())


@pytest.mark.usefixtures("scaffold")
def test_a_part_of_a_notebook_and_a_composed_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code_block("python", "class Confident"), {"__name__": "a_notebook"})
    assert "compose on ml-digits, round 1" in capsys.readouterr().out
    file = tmp_path / "composed.toml"
    file.write_text(code_block("toml", 'name = "compose"'))
    method = make_trainer(Experiment.load(file)).method
    assert [part.name for part in method.active_parts] == ["masked", "proximal", "my-control-variates", "mean"]
    assert method.active_parts[1].options.mu == 0.1
