"""The Ray engine: the jobs of the local engine on the actors of a Ray cluster, with the same weights, bit for bit.

The driver holds the server's state and the client states; an actor holds only its data and one model. What an actor
needs for a job is sent with it, so the run's folder need not be shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fedmll.config.settings import EngineSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines import ray_cluster
from fedmll.engines.ray_pool import ActorResources, RayPool
from fedmll.engines.ray_worker import RunDescription
from fedmll.engines.simulation import SimulationEngine
from fedmll.engines.worker_pool import Job


class RayEngine(SimulationEngine):
    """Trains all clients on Ray actors."""

    def __init__(self, federation: Federation, client_state_folder: Path, progress: Progress = no_progress) -> None:
        experiment = federation.experiment
        _check_names(experiment.data.name, experiment.model.backbone, experiment.training.loss)
        super().__init__(federation, client_state_folder, torch.device("cpu"), progress)
        setting = experiment.engine
        ray_cluster.connect(setting)
        count, resources = plan_actors(setting, ray_cluster.import_ray().cluster_resources())
        ray_cluster.check_nodes()
        described = RunDescription(
            experiment=experiment.to_toml(),
            fingerprint=experiment.fingerprint(),
            data=federation.fingerprints,
            plugins=registry.plugin_versions(experiment.plugins),
            folder=str(Path.cwd()),
            device="cuda" if resources.gpus else "cpu",
        )
        self.pool = RayPool(count, resources, described, lambda text: self.on_warning(text), progress)

    def attach_features(self, federation: Federation, progress: Progress) -> Federation:
        """The actors compute the features of a frozen backbone; the driver needs none."""
        return federation

    def run_jobs(self, jobs: Iterator[Job], count: int, shared: Tensors) -> Iterator[tuple[Job, list[Message]]]:
        self.pool.share(shared.values())
        yield from self.pool.run(jobs, count, self.read_client_states, self.write_client_states)

    def close(self) -> None:
        self.pool.close()


def plan_actors(setting: EngineSettings, available: dict[str, float]) -> tuple[int, ActorResources]:
    """How many actors there are, and what each takes from its node.

    Raises:
        ConfigError: the cluster has less than that.
    """
    cpus, gpus = int(available.get("CPU", 0)), int(available.get("GPU", 0))
    if setting.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"engine.device = '{setting.device}' names a device of one machine. With engine.kind = 'ray' use cpu, cuda "
            "or auto: Ray gives each actor its GPU."
        )
    if setting.device == "cuda" or (setting.device == "auto" and gpus):
        room, each = gpus * setting.per_device, f"{gpus} GPUs for {setting.per_device} actors each"
        resources = ActorResources(gpus=1 / setting.per_device)
    else:
        room, each, resources = cpus, f"{cpus} CPUs for one actor each", ActorResources()
    count = room if setting.workers == "auto" else int(setting.workers or 1)
    if not 0 < count <= min(room, cpus):
        raise ConfigError(
            f"engine.device = '{setting.device}' and engine.workers = {setting.workers}: the Ray cluster has {each}, "
            f"and {cpus} CPUs. Add nodes with `ray start --address …`, or ask for less."
        )
    return count, resources


def _check_names(*names: str) -> None:
    """Objects of this process are not on the nodes."""
    given = next((name for name in names if name.startswith(registry.OBJECT_PREFIX)), None)
    if given is not None:
        raise ConfigError(
            f"engine.kind = 'ray' cannot use the Python object '{given}', which the nodes of a cluster do not have. "
            "Put the data into a file and the model or loss into a plug-in file, or use engine.kind = 'local'."
        )
