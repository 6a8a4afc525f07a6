"""Start the engine that an experiment asks for (`engine.kind`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmll.config.settings import EngineSettings
from fedmll.core.errors import ConfigError
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress
from fedmll.engines.devices import choose_local_device
from fedmll.engines.local import LocalEngine
from fedmll.engines.simulation import SimulationEngine


def prepare_engine(setting: EngineSettings) -> None:
    """Check what the engine needs before any data is loaded: Ray connects to its cluster.

    Raises:
        ConfigError: the engine cannot work with these settings, here.
    """
    if setting.kind == "ray":
        from fedmll.engines import ray_cluster  # here: importing Ray takes a second
        from fedmll.engines.ray_engine import plan_actors

        ray_cluster.connect(setting)
        plan_actors(setting, ray_cluster.import_ray().cluster_resources())
        return
    if setting.address is not None:
        raise ConfigError("engine.address is for a Ray cluster: set engine.kind = 'ray' (--engine ray) too.")
    choose_local_device(setting)


def start_engine(data: Federation, client_state_folder: Path, progress: Progress) -> SimulationEngine:
    if data.experiment.engine.kind == "ray":
        from fedmll.engines.ray_engine import RayEngine

        return RayEngine(data, client_state_folder, progress)
    return LocalEngine(data, client_state_folder, progress)


def check_parallel_runs(setting: EngineSettings) -> None:
    """Raise a ConfigError if several runs cannot go on at a time (`fedmll compare --jobs`)."""
    if setting.kind == "ray" and (setting.address is None or setting.workers == "auto"):
        raise ConfigError(
            "--jobs with --engine ray needs the --address of a cluster, and --workers for the number of actors of one "
            "run. Without --jobs each run uses all of Ray, one run after the other."
        )


@contextmanager
def shared_engine(setting: EngineSettings) -> Iterator[None]:
    """Runs of this process in the block share what is slow to start: the actors of Ray."""
    if setting.kind != "ray":
        yield
        return
    from fedmll.engines.ray_pool import keep_actors

    with keep_actors():
        yield
