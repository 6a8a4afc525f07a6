"""The study that a server offers its sites: which experiments can be federated, and what sites receive of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from fedmll.config.experiment import Experiment
from fedmll.config.settings import NO_DATA
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.deploy import file_references
from fedmll.deploy.server.server_data import load_data_of_server
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.study_setup import StudySetup
from fedmll.methods import build_method, config_of
from fedmll.methods.task import Task
from fedmll.training.callbacks import Callback


def build_setup(
    experiment: Experiment, classes: Sequence[str], shape: tuple[int, ...], clients: int, run: str = ""
) -> StudySetup:
    """What sites receive with every message.

    Args:
        experiment: as `resolve_for_sites` returns it.
        classes: the classes of the federation.
        shape: of an image.
        clients: the number of clients.
        run: the name of the run.
    """
    method = build_method(Task(experiment, tuple(classes), shape, clients, torch.device("cpu")))
    return StudySetup(
        run=run,
        experiment=settings_for_sites(experiment),
        classes=None if method.has("private-labels") else tuple(classes),
        shape=shape,
        clients=clients,
    )


def study_digest(experiment: Experiment, clients: int) -> str:
    """The digest that the sites of such a federation approve (`fedmll join --approve`); no server is needed for it."""
    check_can_be_federated(experiment)
    test = load_data_of_server(experiment, Callback()).test
    resolved = resolve_for_sites(experiment, test.sample_shape)
    return build_setup(resolved, test.classes, test.sample_shape, clients).digest


def resolve_for_sites(experiment: Experiment, shape: tuple[int, ...]) -> Experiment:
    """The experiment with all settings that must be the same at every site."""
    return experiment.settled(federation.derive_settings(shape, has_validation=False) | {"partition.kind": "natural"})


def settings_for_sites(experiment: Experiment) -> dict[str, Any]:
    """The settings that sites receive: not where the server's data is, and none of the server's own settings."""
    values: dict[str, Any] = json.loads(
        experiment.model_dump_json(exclude_none=True, exclude={"data", "sites", "engine", "plugins"})
    )
    name = values["method"].pop("name")
    values["method"] = {"name": name} | config_of(experiment).values_for_sites(values["method"])
    values["partition"].pop("server")
    return file_references.replace_files_by_digests(values) | {"data": {"name": NO_DATA}}


def check_can_be_federated(experiment: Experiment) -> None:
    """Raise a ConfigError if the experiment cannot run between machines."""
    name, method = experiment.method.name, config_of(experiment)
    if method.pooled:
        raise ConfigError(
            f"'{name}' trains on all data in one place, which a federation between machines exists to avoid. "
            "Choose another method (`fedmll methods`)."
        )
    if any("local-models" in part.provides for part in method.recipe.parts):
        raise ConfigError(f"'{name}' exchanges nothing, so a server has nothing to do.")
    if experiment.training.clients_per_batch is not None:
        raise ConfigError("training.clients_per_batch is for simulations: between machines every site trains alone.")
    if experiment.model.backbone == "mlp":
        raise ConfigError("A federation between machines is for images; feature vectors are for `fedmll run`.")


def check_can_start_with(experiment: Experiment, settings: ServerSettings) -> None:
    """Raise a ConfigError if the method needs all clients at the start, and not all are waited for."""
    opening = [part.name for part in config_of(experiment).recipe.parts if "opening" in part.exchanges]
    if opening and settings.clients_to_start < len(settings.participants):
        raise ConfigError(
            f"'{experiment.method.name}' asks every client once before round 1 ({', '.join(opening)}), so no client "
            "can join later: leave --start-with out."
        )
