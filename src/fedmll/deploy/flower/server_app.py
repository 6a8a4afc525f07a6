"""The ServerApp, for Flower's own runtimes, and its simulation engine: the same two apps on a Ray cluster, for a
simulation that outgrows a machine. Every machine of the cluster sees the sites' folders under the same paths.

    python -m fedmll.deploy.flower.server_app EXPERIMENT.toml --sites DIR --out DIR [--address auto]

DIR holds NAME.json for every site, written by `remember_site` (or `fedmll server --simulate`)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedmll.deploy import label_counts, serving
from fedmll.deploy.flower.processes import quiet_flower
from fedmll.deploy.flower.site_app import SITES
from fedmll.deploy.site_worker import recall_site
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running import loop
from fedmll.running.observers import Observer

OUT = "FEDMLL_OUT"

app = ServerApp()


class Print(Observer):
    def warning(self, text: str) -> None:
        print(text, flush=True)

    def round_done(self, row: loop.Row) -> None:
        print(f"round {row['round']}: {row['clients']} clients, loss {row['loss']:.4g}", flush=True)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`out` holds the experiment and may be resumed; `sites` the sites' files: by the run's config or environment."""
    out = Path(str(context.run_config.get("out") or os.environ[OUT]))
    sites = Path(str(context.run_config.get("sites") or os.environ[SITES]))
    names = tuple(recall_site(path).name for path in sorted(sites.glob("*.json")))
    server = serving.Server(names, keys=None, min_clients=len(names), run=_run_name(out))
    serving.drive(grid, loop.experiment_in(out), server, out, Print(), confirm=label_counts.beforehand)


def simulate(experiment: Experiment, sites: Path, out: Path, address: str | None = None, cpus: float = 1) -> None:
    """Run on Flower's simulation engine. `address` is a Ray cluster's ("auto": the one this machine belongs to)."""
    count = len(list(sites.glob("*.json")))
    if not count:
        raise ConfigError(f"{sites} holds no site: NAME.json for each is needed.")
    if not (out / "experiment.toml").exists():
        shape = serving.own_data(experiment, Observer()).test.sample_shape
        loop.create(out, serving.settled(experiment, shape))
    os.environ |= quiet_flower(out / "flower") | {SITES: str(sites.resolve()), OUT: str(out.resolve())}
    from flwr.simulation import run_simulation

    from fedmll.deploy.flower import site_app

    init: dict[str, Any] = {"include_dashboard": False} | ({} if address is None else {"address": address})
    resources: dict[str, Any] = {"num_cpus": cpus, "num_gpus": 0.0}
    run_simulation(app, site_app.app, count, backend_config={"init_args": init, "client_resources": resources})


def _run_name(out: Path) -> str:
    """The same for a resumed run, another one for a new run."""
    return f"{(out / 'experiment.toml').stat().st_mtime_ns:x}"


def command() -> None:
    parser = argparse.ArgumentParser(description="A federation on Flower's simulation engine (Ray).")
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--sites", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--address", default=None, help="of a Ray cluster; 'auto': the one of this machine")
    options = parser.parse_args()
    simulate(Experiment.load(options.experiment), options.sites, options.out, options.address)


if __name__ == "__main__":
    command()
