"""Values of an experiment before validation: read TOML, apply `section.key` overrides, explain validation errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmll.core.errors import ConfigError
from fedmll.core.text import printable, suggest

M = TypeVar("M", bound=BaseModel)
MAX_DEPTH = 20


def read_toml(path: Path) -> dict[str, Any]:
    """Read an experiment file. Plug-in files in it are relative to the experiment file."""
    values = parse_toml(path)
    plugins = values.get("plugins")
    if isinstance(plugins, list) and all(isinstance(file, str) for file in plugins):
        values["plugins"] = [str(path.parent / file) for file in plugins]
    return values


def parse_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file as they are."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"There is no experiment file {path}. `fedmll run` without a file uses the defaults."
        ) from None
    except ValueError as error:  # also text that is not UTF-8, and numbers with thousands of digits
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None
    except RecursionError:
        raise _too_deep(str(path)) from None
    _check_depth(values, str(path))
    return values


def _check_depth(values: Any, source: str) -> None:
    """Raise ConfigError for deeply nested values: every function that walks over them is recursive."""
    if is_nested_deeper(values, MAX_DEPTH):
        raise _too_deep(source)


def is_nested_deeper(values: Any, levels: int) -> bool:
    """Whether lists and tables are nested more than `levels` deep. Not recursive, so any depth can be tested."""
    level = [values]
    for _ in range(levels):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def _too_deep(source: str) -> ConfigError:
    return ConfigError(f"{source} is nested more than {MAX_DEPTH} levels deep; an experiment needs four.")


def parse_value(text: str) -> Any:
    """A value as in a TOML file; text that is not TOML is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text
    except RecursionError:
        raise _too_deep(f"The value {text[:20]}…") from None
    _check_depth(value, f"The value {text[:20]}…")
    return value


def merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` with `section.key` overrides."""
    result = _deep_copy(values)
    for path, value in overrides.items():
        *sections, key = path.split(".")
        if len(sections) > MAX_DEPTH:
            raise _too_deep(f"The key {path[:20]}…")
        section = result
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"'{path}' cannot be set: '{name}' is a value, not a section.")
        section[key] = value
    return result


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _deep_copy(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values without None, which TOML cannot express."""
    return {
        name: without_none(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def validate(model: type[M], values: Mapping[str, Any], prefix: str = "") -> M:
    """Validate values with a pydantic model; a ConfigError names each wrong key, and the most similar valid one."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("The experiment is not valid: " + " ".join(_explain(model, error, prefix))) from None


def _explain(model: type[BaseModel], error: ValidationError, prefix: str) -> list[str]:
    """One sentence per problem, without pydantic's names of types."""
    sentences, alternatives = [], dict[str, list[tuple[str, Any]]]()
    for problem in error.errors():
        names, fields, kind = _find_field(model, problem["loc"])
        path = ".".join(filter(None, [prefix, *names]))
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])
            sentences.append(f"There is no key '{f'{path}.{name}' if path else name}'{suggest(name, fields)}")
        elif kind is None:
            sentences.append(_sentence(path, _message(problem), problem["input"]))
        else:  # of a setting that can have several types, each has a problem of its own
            alternatives.setdefault(path, []).append((kind, problem))
    for path, problems in alternatives.items():
        is_list = any(isinstance(problem["input"], list | tuple) for _, problem in problems)
        fitting = [problem for kind, problem in problems if kind.startswith("tuple") == is_list]
        fitting = fitting or [problem for _, problem in problems]
        messages = [_message(problem).partition(", unable")[0].partition(", got")[0] for problem in fitting]
        first, *others = dict.fromkeys(messages)
        text = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
        sentences.append(_sentence(path, text, fitting[0]["input"]))
    return sentences


def _find_field(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str], str | None]:
    """The names on the way to a setting, the keys that are valid there, and the type that pydantic tried, if the
    setting can have several."""
    names: list[str] = []
    fields: Any = model
    for part in location:
        if not (isinstance(fields, type) and issubclass(fields, BaseModel)):
            return names, [], part if isinstance(part, str) else None
        if part not in fields.model_fields:
            break
        names.append(str(part))
        fields = fields.model_fields[str(part)].annotation
    return names, list(getattr(fields, "model_fields", ())), None


def _message(problem: Any) -> str:
    """pydantic's message in the words of a TOML file."""
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
        return "The list needs more values"
    message = problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    message = re.sub(r"a valid dictionary or instance of \w+", "a section with keys", message)
    return message.replace("Tuple should", "The list should")


def _sentence(path: str, message: str, value: Any) -> str:
    return f"{path or 'experiment'}: {message} (it is {printable(repr(value), 200)})."
