"""A mistake in a user's own part, head, loss or method: the command prints one sentence that names the object and what
it must be, without a traceback. Correct code is not affected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmll.core import registry
from fedmll.methods.framework.base import Part, vectorized
from fedmll.methods.framework.contract_checks import check_network, is_built_in
from fedmll.testing import experiment, make_trainer

HEADER = """
import torch
from torch import nn
from fedmll import Method, Part, register
from fedmll.methods.framework.base import Head, PartOptions, TensorSpec, option
from fedmll.models.network import Network
"""
METHOD = """
class Mine(Method):
    name = "mine"
    parts = (*Method.parts, MyPart)
"""


def part(body: str, declarations: str = "") -> str:
    """A plug-in with a part and a method that uses it."""
    lines = "\n".join(f"    {line}" for line in f'name = "my-part"\n{declarations}\n{body}'.splitlines())
    return f"{HEADER}\nclass MyPart(Part):\n{lines}\n{METHOD}"


def head(network: str, build: str = "return MyNetwork(backbone, len(self.task.classes))") -> str:
    lines = "\n".join(f"    {line}" for line in network.splitlines())
    return f"""{HEADER}
class MyNetwork(Network):
    def __init__(self, backbone, classes):
        super().__init__(backbone)
        self.rows = nn.Linear(backbone.width, classes)
{lines}

class MyHead(Head):
    name = "my-head"
    def build(self, backbone):
        {build}

class Mine(Method):
    name = "mine"
    head = MyHead
"""


CASES = {
    # the definition
    "two arguments instead of three": (
        part("def loss(self, step):\n    return None"),
        r"The part 'my-part': `loss` takes \(self, step\), and must take \(self, step, round_state\)",
    ),
    "too many arguments": (
        part("def on_round_start(self, client_round, round_state):\n    return None"),
        r"`on_round_start` takes \(self, client_round, round_state\), and must take \(self, client_round\)",
    ),
    "misspelled hook": (
        part("def on_gradient(self, client_round, round_state):\n    pass"),
        "`on_gradient` is not a hook and would never run. Did you mean on_gradients",
    ),
    "hook under another name": (
        part("def term(self, step, round_state):\n    pass"),
        "`term` is not a hook and would never run. Did you mean loss",
    ),
    "unknown event": (
        part("def on_batch_begin(self, client_round):\n    pass"),
        "`on_batch_begin` is not a hook .* Did you mean on_gradients, on_round_end, on_round_start, on_step_end",
    ),
    "hook of another class": (
        part("def transform_images(self, images, tensors):\n    return images"),
        "`transform_images` is a hook of ImageTransform; derive the class from ImageTransform",
    ),
    "check without classmethod": (
        part("def check(cls, options, experiment, prefix):\n    pass"),
        "`check` must be a class method; write @classmethod",
    ),
    "hook with classmethod": (
        part("@classmethod\ndef loss(cls, step, round_state):\n    pass"),
        "`loss` must not be a class method",
    ),
    "sends is not a tuple": (
        part("", 'sends = ("c")'),
        r"`sends` is 'c', and must be a tuple of names, for example \('c',\)",
    ),
    "provides is not a set": (part("", 'provides = "views"'), "`provides` is 'views', and must be a set of names"),
    "unknown exchange": (part("", 'exchanges = {"start"}'), "`exchanges` has start; use closing, opening, rounds"),
    "options are not a model": (part("class Options:\n    x = 1"), "`Options` must be a subclass of .*PartOptions"),
    "own constructor": (
        part("def __init__(self):\n    pass"),
        r"`__init__` takes \(self\), and must take \(self, task, options, other_parts\)",
    ),
    # the method
    "module as a part": (
        f"{HEADER}\nclass MyPart(nn.Module):\n    pass\n{METHOD}",
        "The method 'mine': `parts` has the class MyPart, and must have subclasses of fedmll.Part",
    ),
    "object as a part": (
        f"{HEADER}\nMyPart = nn.Linear(2, 2)\n{METHOD}",
        "The method 'mine': `parts` has an object of Linear, and must have subclasses",
    ),
    "parts without a comma": (
        part("").replace("(*Method.parts, MyPart)", "(MyPart)"),
        "The method 'mine': `parts` is the class MyPart, and must be a tuple",
    ),
    "part without a name": (part("").replace('name = "my-part"', "pass"), "the part MyPart has no `name`"),
    "average that does not aggregate": (
        part("").replace("parts = (*Method.parts, MyPart)", "average = MyPart"),
        "The method 'mine': the average 'my-part' does not provide 'aggregation'",
    ),
    "module as a head": (
        part("").replace("parts = (*Method.parts, MyPart)", "head = nn.Linear"),
        "The method 'mine': `head` is the class Linear, and must be a subclass of Head",
    ),
    "function as a method": (
        f'{HEADER}\n@register("method", "mine")\ndef mine(): pass\n',
        "The method 'mine' is an object of function .*, and must be a subclass of .*MethodEntry",
    ),
    # the first round
    "error in a hook": (
        part("def loss(self, step, round_state):\n    return step.logit.mean()"),
        r"The part 'my-part' failed in `loss` with AttributeError: 'TrainStep' object has no attribute 'logit' "
        r"\(plugin.py, line 11\)",
    ),
    "loss per entry": (
        part("def loss(self, step, round_state):\n    return step.logits"),
        r"`loss` returned a tensor of the shape \(16, 10\), and must return None or a tensor with a single number",
    ),
    "loss is a float": (part("def loss(self, step, round_state):\n    return 0.1"), "`loss` returned float, and must"),
    "no reply": (
        part("def on_round_end(self, client_round, round_state):\n    pass"),
        r"`on_round_end` returned None, and must return a dict of named tensors \({} for none\)",
    ),
    "numbers in a reply": (
        part("def on_round_end(self, client_round, round_state):\n    return {'x': 1.0}"),
        "`on_round_end` returned a dict with x: float, and must return a dict of named tensors",
    ),
    "reply without a specification": (
        part("def on_round_end(self, client_round, round_state):\n    return {'x': torch.zeros(2)}"),
        "refused: it holds the unknown key my-part/x .neither in `sums` nor in `reply_spec` of the part 'my-part'",
    ),
    "specification without a reply": (
        part("def reply_spec(self, sent, round):\n    return {'x': TensorSpec((2,))}"),
        "refused: it lacks my-part/x",
    ),
    "specification of another type": (
        part("def reply_spec(self, sent, round):\n    return {'x': (2,)}"),
        "`reply_spec` returned a dict with x: tuple, and must return a dict of names and TensorSpec",
    ),
    "another shape": (
        part(
            "def reply_spec(self, sent, round):\n    return {'x': TensorSpec((2,))}\n"
            "def on_round_end(self, client_round, round_state):\n    return {'x': torch.zeros(3)}"
        ),
        r"my-part/x is torch.float32 \(3,\), not torch.float32 \(2,\)",
    ),
    "a tensor that is not in the state": (
        part("", 'sends = ("c",)'),
        "The part 'my-part' has 'c' in `sends`, which is not in its state: return it from `initial_state`",
    ),
    "a sum that is not sent": (
        part("def on_round_end(self, client_round, round_state):\n    return {'c': torch.zeros(2)}", 'sums = ("c",)'),
        "The part 'my-part' has 'c' in `sums`, which is not a tensor that it sends: describe it with a TensorSpec",
    ),
    "a sum that is not in the state": (
        part(
            "def on_round_end(self, client_round, round_state):\n    return {'c': torch.zeros(2)}\n"
            "def reply_spec(self, sent, round):\n    return {'c': TensorSpec((2,))}",
            'sums = ("c",)',
        ),
        "The part 'my-part' has 'c' in `sums`, which is not in its state: write `update_state`",
    ),
    "other summands": (
        part(
            "def initial_state(self):\n    return {'c': torch.zeros(2)}\n"
            "def on_round_end(self, client_round, round_state):\n    return {'c': torch.zeros(2)}\n"
            "def summands(self, client, reply):\n    return {'d': reply['c']}",
            'sends = sums = ("c",)',
        ),
        "The part 'my-part': `summands` returned d, and must return the tensors in `sums`: c",
    ),
    "state is not a pair": (
        part(
            "def initial_state(self):\n    return {'c': torch.zeros(2)}\n"
            "def on_round_end(self, client_round, round_state):\n    return {'c': torch.zeros(2)}\n"
            "def update_state(self, state, sums, round):\n    return sums",
            'sends = sums = ("c",)',
        ),
        "`update_state` returned a dict .*, and must return the next state and what is logged, two dicts",
    ),
    "number in the next state": (
        part(
            "def initial_state(self):\n    return {'c': torch.zeros(2)}\n"
            "def on_round_end(self, client_round, round_state):\n    return {'c': torch.zeros(2)}\n"
            "def update_state(self, state, sums, round):\n    return {'c': 1.0}, {}",
            'sends = sums = ("c",)',
        ),
        "`update_state` returned tuple, and must return the next state and what is logged, two dicts",
    ),
    "number in the client state": (
        part(
            "def on_round_end(self, client_round, round_state):\n"
            "    self.client_state(client_round)['rounds'] = 1\n    return {}"
        ),
        "The part 'my-part' keeps 'rounds' = int in its client state, which holds only tensors",
    ),
    # heads
    "head without a network": (
        head("", "return nn.Linear(2, 2)"),
        "The head 'my-head': `build` returned Linear, and must return a fedmll.models.network.Network",
    ),
    "head with another number of outputs": (
        head("def logits(self, features):\n    return self.rows(features)[:, :2]"),
        r"The head 'my-head': its network returned a tensor of the shape \(2, 2\) for 2 samples, and must return "
        r"logits of the shape \(2, 10\)",
    ),
    "head with a wrong width": (
        head("def logits(self, features):\n    return self.rows(features[:, :3])"),
        "The head 'my-head': its network fails for a batch of samples with RuntimeError: mat1 and mat2",
    ),
    "head that fails": (
        head("", "return Classifier(backbone)"),
        "The head 'my-head' failed in `build` with NameError: name 'Classifier' is not defined",
    ),
    # losses
    "scalar loss": (
        f'{HEADER}\n@register("loss", "my-loss")\ndef mine(logits, targets, positive_weight): return logits.mean()\n',
        r"The loss 'my-loss' returns a tensor of the shape \(\)",
    ),
}


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = set(registry._modules)
    yield
    for (kind, name), module in list(registry._modules.items()):
        if (kind, name) not in before and not module.startswith("fedmll."):
            del registry._modules[kind, name], registry._registered[kind][name]
    registry._files.pop("fedmll_plugin_plugin", None)


def words(case: str) -> tuple[str, ...]:
    method = ("fedavg-pl", "--set", "training.loss=my-loss") if case == "scalar loss" else ("mine",)
    small = {"data.limit": 80, "partition.clients": 2, "model.channels": "[4,8]", "training.batch_size": 16}
    settings = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    return ("run", "--plugin", "plugin.py", "--method", *method, "--rounds", "1", *settings, "--out", "out")


def refusal(code: str, words: tuple[str, ...], fedmll: Callable[..., Any]) -> str:
    """What the command says, in one line; never a traceback."""
    Path("plugin.py").write_text(code.lstrip())
    done = fedmll(*words)
    assert done.code == 2
    assert "Traceback" not in done.error + done.out
    return " ".join(done.error.split())


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_one_sentence(case: str, fedmll: Callable[..., Any]) -> None:
    code, expected = CASES[case]
    text = refusal(code, (*words(case), "--workers", "0"), fedmll)
    assert re.search(expected, text), text


@pytest.mark.parametrize("case", ["error in a hook", "no reply"])
def test_mistake_in_a_worker_is_one_sentence(case: str, fedmll: Callable[..., Any]) -> None:
    code, expected = CASES[case]
    text = refusal(code, (*words(case), "--workers", "2"), fedmll)
    assert re.search(expected, text), text


def test_registered_module_is_refused_as_a_part(fedmll: Callable[..., Any]) -> None:
    code = f'{HEADER}\nregister("part", "my-part")(nn.Linear)\n'
    composed = ("--method", "compose", "--set", "method.parts=['masked','my-part']")
    text = refusal(code, ("run", "--plugin", "plugin.py", *composed), fedmll)
    assert "The part 'my-part' is the class Linear" in text
    assert "must be a subclass of fedmll.methods.framework.base.Part" in text


def test_correct_part_is_not_affected() -> None:
    """Helpers with other names, more parameters with defaults, and the mark of a vectorized hook are fine."""

    class Fine(Part):
        name = "fine"

        @vectorized
        def loss(self, step: Any, round_state: Any, factor: float = 1.0) -> Any:
            return None

        def strength(self) -> float:
            return 1.0

        def _on_round_ends(self) -> None: ...  # private, so it is not a misspelled hook

    assert Fine.loss.vectorized  # type: ignore[attr-defined]
    assert Fine.loss(Fine.__new__(Fine), None, None) is None


def test_memory_errors_are_not_taken_for_mistakes() -> None:
    class Large(Part):
        name = "large"

        def loss(self, step: Any, round_state: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Large.__new__(Large).loss(None, None)


def test_built_in_hooks_run_without_checks() -> None:
    def guarded(cls: type) -> list[str]:
        hooks = {name: getattr(hook, "__func__", hook) for name, hook in vars(cls).items()}
        return [name for name, hook in hooks.items() if getattr(hook, "__code__", None) is guard]

    class Own(Part):
        name = "own"

        def loss(self, step: Any, round_state: Any) -> Any:
            return None

    guard = Own.loss.__code__
    assert guarded(Own) == ["loss"]
    built_in = [cls for kind in ("part", "head") for cls in registry.all_of(kind).values() if is_built_in(cls)]
    assert len(built_in) > 40 and not any(map(guarded, built_in))


def test_checking_a_network_does_not_change_its_running_statistics() -> None:
    trainer = make_trainer(experiment(), shape=(1, 8, 8))
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    assert before  # BatchNorm's
    check_network(trainer.method.network_head, trainer.model, (1, 8, 8), len(trainer.task.classes))
    assert trainer.model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in trainer.model.named_buffers())
