"""The experiment as its sites receive it: the setup of a study, and the digest that a site approves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedmll.config.experiment import Experiment
from fedmll.config.settings import NO_DATA
from fedmll.core.errors import ConfigError
from fedmll.core.text import printable
from fedmll.data import federation
from fedmll.deploy import file_references
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.methods import build_method, config_of
from fedmll.methods.framework.task import Task

DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class StudySetup:
    """What the server sends to every site with every message, because either may have been restarted."""

    run: str  # the name of the server's run. Another run must not use this one's client state.
    experiment: dict[str, Any]  # the sections of the experiment that sites need
    # the classes of the study; None: label sets are private, and a site knows only its own classes
    classes: tuple[str, ...] | None
    shape: tuple[int, ...]  # channels, height and width of the images
    clients: int  # the number of clients

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def values(self) -> dict[str, Any]:
        """The fields with JSON types (lists instead of tuples)."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    @property
    def digest(self) -> str:
        """The digest of the study, which `fedmll join --approve` takes. The name of the run is not part of it."""
        return compute_study_digest({name: value for name, value in self.values.items() if name != "run"})

    @classmethod
    def from_json(cls, text: str) -> StudySetup:
        """Read what a server sent.

        Raises:
            SiteError: the text is not a setup.
        """
        try:
            values = json.loads(text)
            classes = values["classes"]
            found = cls(
                **values | {"classes": None if classes is None else tuple(classes), "shape": tuple(values["shape"])}
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SiteError(SiteErrorCode.MESSAGE, f"The server's experiment cannot be read ({error}).") from None
        names, sides = found.classes or (), found.shape
        if not all(isinstance(name, str) for name in names) or not isinstance(found.clients, int):
            raise SiteError(SiteErrorCode.MESSAGE, "The server's classes and number of clients cannot be read.")
        if len(sides) != 3 or not all(type(side) is int and side > 0 for side in sides):
            raise SiteError(SiteErrorCode.MESSAGE, "The server's image size cannot be read.")
        return found


def resolve_for_sites(experiment: Experiment, shape: tuple[int, ...]) -> Experiment:
    """The experiment with all settings that must be the same at every site."""
    return experiment.settled(federation.derive_settings(shape, has_validation=False) | {"partition.kind": "natural"})


def settings_for_sites(experiment: Experiment) -> dict[str, Any]:
    """The settings that sites receive: not where the server's data is, and none of the server's own settings."""
    values: dict[str, Any] = json.loads(
        experiment.model_dump_json(exclude_none=True, exclude={"data", "study", "sites", "engine", "plugins"})
    )
    name = values["method"].pop("name")
    values["method"] = {"name": name} | config_of(experiment).values_for_sites(values["method"])
    values["partition"].pop("server")
    return file_references.replace_files_by_digests(values) | {"data": {"name": NO_DATA}}


def build_setup(
    experiment: Experiment, classes: Sequence[str], shape: tuple[int, ...], clients: int, run: str = ""
) -> StudySetup:
    """The setup of an experiment that `resolve_for_sites` returned; `shape` is that of an image."""
    method = build_method(Task(experiment, tuple(classes), shape, clients, torch.device("cpu")))
    return StudySetup(
        run=run,
        experiment=settings_for_sites(experiment),
        classes=None if method.has("private-labels") else tuple(classes),
        shape=shape,
        clients=clients,
    )


def compute_study_digest(study: dict[str, Any]) -> str:
    """SHA-256 of what the server asks for, as JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(study, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_digest(text: str | None) -> str | None:
    """The value of --approve: 64 hexadecimal digits, with or without `sha256:` before them."""
    if text is None:
        return None
    digest = text.strip().lower().removeprefix("sha256:")
    if not DIGEST.fullmatch(digest):
        raise ConfigError(
            f"--approve takes the digest of a study, 64 hexadecimal digits; it got '{printable(text, 100)}'. `fedmll "
            "check --study` computes it, and `fedmll server` and `fedmll join` show it."
        )
    return digest
