"""The ServerApp, for Flower's simulation engine: the same two apps on a Ray cluster.

Every machine of the cluster must see the sites' folders under the same paths.

    python -m fedmll.deploy.flower.server_app EXPERIMENT.toml --sites DIR --out DIR [--address auto]

DIR holds one NAME.json per site, written by `write_site_file`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.text import confirm_always
from fedmll.deploy.experiment_for_sites import resolve_for_sites
from fedmll.deploy.flower.child_processes import flower_environment
from fedmll.deploy.flower.client_app import SITES
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.site_federation import load_server_data
from fedmll.deploy.site.approval import delete_setup_record
from fedmll.deploy.site.site_config import read_site_file
from fedmll.runs.run_folder import EXPERIMENT_FILE, MetricsRow, RunFolder
from fedmll.training.callbacks import Callback

OUT = "FEDMLL_OUT"  # the environment variable with the run's folder

app = ServerApp()


class PrintCallback(Callback):
    """Prints warnings and rounds."""

    def on_warning(self, text: str) -> None:
        print(text, flush=True)

    def on_round_end(self, row: MetricsRow) -> None:
        print(f"round {row['round']}: {row['clients']} clients, loss {row['loss']:.4g}", flush=True)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment in the folder `out` with the sites in the folder `sites`, from the config or environment."""
    out = Path(str(context.run_config.get("out") or os.environ[OUT]))
    sites = Path(str(context.run_config.get("sites") or os.environ[SITES]))
    names = tuple(read_site_file(path).name for path in sorted(sites.glob("*.json")))
    settings = ServerSettings(clients=names, keys=None, min_clients=len(names), run=_run_name(out))
    experiment = RunFolder(out).load_experiment()
    serve.run_federation(grid, experiment, settings, out, callback=PrintCallback(), confirm=confirm_always)


def simulate(experiment: Experiment, sites: Path, out: Path, address: str | None = None, cpus: float = 1) -> None:
    """Run on Flower's simulation engine. `address` is that of a Ray cluster ("auto": the one of this machine)."""
    count = len(list(sites.glob("*.json")))
    for site in sites.glob("*.json"):
        delete_setup_record(site)  # every run of a simulation is a new join of its sites
    if not count:
        raise ConfigError(f"{sites} holds no site: NAME.json for each is needed.")
    if not RunFolder(out).is_run:
        shape = load_server_data(experiment, Callback()).test.sample_shape
        RunFolder(out).create(resolve_for_sites(experiment, shape))
    os.environ |= flower_environment(out / "flower") | {SITES: str(sites.resolve()), OUT: str(out.resolve())}
    from flwr.simulation import run_simulation

    from fedmll.deploy.flower import client_app

    init: dict[str, Any] = {"include_dashboard": False} | ({} if address is None else {"address": address})
    resources: dict[str, Any] = {"num_cpus": cpus, "num_gpus": 0.0}
    run_simulation(app, client_app.app, count, backend_config={"init_args": init, "client_resources": resources})


def _run_name(out: Path) -> str:
    """The same for a resumed run, another one for a new run."""
    return f"{(out / EXPERIMENT_FILE).stat().st_mtime_ns:x}"


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
