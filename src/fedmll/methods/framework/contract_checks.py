"""Checks of the parts, heads and methods that users write. A mistake becomes one sentence that names the class, what is
wrong and what it must be.

A class is checked when it is defined: its declarations, and the names and parameters of its hooks. Its hooks are
checked when they run: what they return and what they raise. Built-in classes are not checked.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from fedmll.core.errors import ConfigError, FedmllError
from fedmll.methods.framework.allowed_replies import TensorSpec
from fedmll.models.network import Network

CLOSE = 0.84  # similarity of a name to a hook from which on it counts as a misspelling
METHODS = FunctionType | classmethod
HELPERS = {"received", "client_state", "shared_options"}  # of the contract: parts call them
EXCHANGES = {"opening", "closing", "rounds"}
OTHER_NAMES = {  # common names for the same thing → the hook
    "prepare": "on_round_start", "term": "loss", "adjust": "on_gradients", "finish": "on_round_end",
    "compute_loss": "loss", "aggregate": "aggregator", "expects": "reply_spec",
}  # fmt: skip


def _are_tensors(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(tensor, Tensor) for tensor in found.values())


def _are_two_dicts(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and _are_tensors(found[0]) and isinstance(found[1], dict)


TENSORS = (_are_tensors, "a dict of named tensors ({} for none)")
RETURNS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "initial_state": TENSORS,
    "send": TENSORS,
    "summands": TENSORS,
    "collect_statistics": TENSORS,
    "on_round_end": TENSORS,
    "update_state": (_are_two_dicts, "the next state and what is logged, two dicts"),
    "reply_spec": (
        lambda found: isinstance(found, dict) and all(isinstance(spec, TensorSpec) for spec in found.values()),
        "a dict of names and TensorSpec",
    ),
    "aggregator": (lambda found: found is None or hasattr(found, "result"), "an Aggregator or None"),
    "loss": (
        lambda found: found is None or (isinstance(found, Tensor) and found.dim() == 0),
        "None or a tensor with a single number, for example a mean",
    ),
    "transform_images": (lambda found: isinstance(found, Tensor), "a tensor of images"),
    "probabilities": (lambda found: isinstance(found, Tensor), "a tensor of probabilities"),
    "build": (lambda found: isinstance(found, Network), "a fedmll.models.network.Network"),
}


def is_built_in(cls: type) -> bool:
    return cls.__module__.startswith("fedmll.")


def check_component(cls: Any, kinds: Iterable[type]) -> None:
    """Check the definition of a user's part or head, and guard its hooks.

    Args:
        cls: The new class.
        kinds: The classes of the contract, whose methods are the hooks.
    """
    methods = {name: kind for kind in kinds for name, value in vars(kind).items() if isinstance(value, METHODS)}
    hooks = {name: kind for name, kind in methods.items() if name[0] != "_" and name not in HELPERS}
    _check_declarations(cls)
    for name, value in list(vars(cls).items()):
        if isinstance(value, METHODS) and (name == "__init__" or name[0] != "_"):
            inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
            if isinstance(inherited, METHODS):
                _check_hook(cls, name, value, inherited)
                setattr(cls, name, _guarded(name, value))
            else:
                _check_misspelling(cls, name, hooks)


def _check_declarations(cls: Any) -> None:
    what = _described(cls)
    for name in ("provides", "requires", "conflicts", "exchanges", "sends", "sums"):
        value = getattr(cls, name, ())
        if isinstance(value, str) or not all(isinstance(one, str) for one in value):
            kind = "tuple" if name in ("sends", "sums") else "set"
            example = "('c',)" if kind == "tuple" else "{'c'}"
            raise ConfigError(f"{what}: `{name}` is {value!r}, and must be a {kind} of names, for example {example}.")
    unknown = set(getattr(cls, "exchanges", ())) - EXCHANGES
    if unknown:
        raise ConfigError(f"{what}: `exchanges` has {', '.join(sorted(unknown))}; use {', '.join(sorted(EXCHANGES))}.")
    if not (isinstance(cls.Options, type) and issubclass(cls.Options, BaseModel)):
        raise ConfigError(f"{what}: `Options` must be a subclass of fedmll.methods.framework.base.PartOptions.")


def _check_hook(cls: Any, name: str, own: Any, inherited: Any) -> None:
    """An override takes the same positional arguments as what it overrides, and is a class method if that is one."""
    if isinstance(inherited, classmethod) and not isinstance(own, classmethod):
        raise ConfigError(f"{_described(cls)}: `{name}` must be a class method; write @classmethod above it.")
    if isinstance(own, classmethod) and not isinstance(inherited, classmethod):
        raise ConfigError(f"{_described(cls)}: `{name}` must not be a class method; remove @classmethod above it.")
    expected = inspect.signature(getattr(inherited, "__func__", inherited))
    found = inspect.signature(getattr(own, "__func__", own))
    try:
        found.bind(*expected.parameters)
    except TypeError:
        raise ConfigError(
            f"{_described(cls)}: `{name}` takes ({', '.join(found.parameters)}), and must take "
            f"({', '.join(expected.parameters)})."
        ) from None


def _check_misspelling(cls: Any, name: str, hooks: dict[str, type]) -> None:
    if name in hooks:
        kind = hooks[name].__name__
        raise ConfigError(f"{_described(cls)}: `{name}` is a hook of {kind}; derive the class from {kind}.")
    meant = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, hooks, 1, CLOSE)), None)
    if meant not in hooks and name.startswith("on_"):
        meant = ", ".join(sorted(hook for hook in hooks if hook.startswith("on_")))
    if meant:
        raise ConfigError(
            f"{_described(cls)}: `{name}` is not a hook and would never run. Did you mean {meant}? If it is a helper, "
            f"call it _{name}."
        )


def _guarded(name: str, hook: Any) -> Any:
    """The hook with checks of what it returns and raises."""
    function = getattr(hook, "__func__", hook)
    accepts, description = RETURNS.get(name, (None, ""))

    @functools.wraps(function)
    def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            found = function(self, *arguments, **named)
        except (FedmllError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(f"{_described(self)} failed in `{name}` with {_reason(error, function)}.") from error
        if accepts is not None and not accepts(found):
            raise ConfigError(f"{_described(self)}: `{name}` returned {_shown(found)}, and must return {description}.")
        if name in ("on_round_end", "collect_statistics"):
            for key, value in arguments[0].client_state(self.name).items():
                if not isinstance(value, Tensor):
                    raise ConfigError(
                        f"{_described(self)} keeps '{key}' = {_shown(value)} in its client state, which holds only "
                        "tensors; use torch.tensor(…)."
                    )
        return found

    return classmethod(guarded) if isinstance(hook, classmethod) else guarded


def _described(component: Any) -> str:
    cls = component if isinstance(component, type) else type(component)
    return f"The {cls.kind} '{cls.name}'" if cls.name else f"The {cls.kind} {cls.__name__}"  # type: ignore[attr-defined]


def _reason(error: Exception, function: Any) -> str:
    """The error, and the last line of the user's file that led to it."""
    file = function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". ") + where


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    if isinstance(value, dict):
        wrong = {key: type(one).__name__ for key, one in value.items() if not isinstance(one, Tensor | TensorSpec)}
        return f"a dict with {', '.join(f'{key}: {kind}' for key, kind in wrong.items())}"
    return "None" if value is None else f"{type(value).__name__}"


def check_network(head: Any, model: Network, sample_shape: tuple[int, ...], classes: int) -> None:
    """Run a user's network once, so that a mistake is found before the first round."""
    try:
        with torch.no_grad():
            found = model.eval().logits(model.features(torch.zeros(2, *sample_shape)))
    except (FedmllError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = _reason(error, inspect.unwrap(type(head).build))
        raise ConfigError(f"{_described(head)}: its network fails for a batch of samples with {reason}.") from error
    finally:
        model.train()
    if not isinstance(found, Tensor) or found.shape != (2, classes):
        raise ConfigError(
            f"{_described(head)}: its network returned {_shown(found)} for 2 samples, and must return logits of the "
            f"shape (2, {classes})."
        )


def check_method(method: Any, part: type, head: type, choice: Any) -> None:
    """Check the head, the parts and the average of a user's method."""
    what = f"The method '{method.name}'"
    if not (isinstance(method.head, type) and issubclass(method.head, head)):
        raise ConfigError(f"{what}: `head` is {_named(method.head)}, and must be a subclass of Head.")
    if not isinstance(method.parts, tuple | list):
        raise ConfigError(f"{what}: `parts` is {_named(method.parts)}, and must be a tuple of parts: (…, MyPart).")
    entries = [("parts", entry) for entry in method.parts] + [("average", method.average)]
    for where, entry in entries:
        for one in entry.parts.values() if isinstance(entry, choice) else (entry,):
            if one is None:
                continue
            if not (isinstance(one, type) and issubclass(one, part)):
                raise ConfigError(f"{what}: `{where}` has {_named(one)}, and must have subclasses of fedmll.Part.")
            if not one.name:  # type: ignore[attr-defined]
                raise ConfigError(f"{what}: the part {one.__name__} has no `name`; give it one.")
            if where == "average" and "aggregation" not in one.provides:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"{what}: the average '{one.name}' does not provide 'aggregation'; derive it from "  # type: ignore[attr-defined]
                    "fedmll.methods.parts.averaging.WeightedAverage, or move it to `parts`."
                )


def _named(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"an object of {type(thing).__name__}"
