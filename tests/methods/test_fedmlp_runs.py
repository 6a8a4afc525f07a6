"""FedMLP in whole runs: everything off, what is computed once, tags that last, interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import small
from fedmlp_builders import EARLY
from safetensors.torch import load_file

from fedmll import resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.data import federation
from fedmll.methods.framework.client_round import Batch, Client
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import Callback

OFF = {"method__mld": False, "method__wpc": False, "method__cr": False, "method__st": False}


def test_everything_off_is_fedavg_bit_for_bit() -> None:
    common = {"annotation__kind": "missing", "annotation__missing": 6, "training__rounds": 3}
    plain = run(small(**common))
    off = run(small(method__name="fedmlp", method__t1=1, **OFF, **common))
    assert all(torch.equal(plain.weights[name], off.weights[name]) for name in plain.weights)
    assert [row["bytes_up"] for row in off.rows] == [row["bytes_up"] for row in plain.rows]


def test_fixed_outputs_of_a_round_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often a client's model goes over all its data: never, after training, before and after it."""
    scans: list[int] = []
    real = Client.evaluation_batches

    def counted(client: Client) -> Iterator[Batch]:
        scans.append(client.round)
        return real(client)

    monkeypatch.setattr(Client, "evaluation_batches", counted)
    run(small(**EARLY | {"method__t1": 2, "training__rounds": 3, "training__local_epochs": 3}))
    assert [scans.count(number) for number in (1, 2, 3)] == [0, 4, 8]  # four clients
    scans.clear()
    result = run(small(method__name="fedmlp", method__t1=1, method__mld=False, method__cr=False))  # WPC only
    assert not scans
    assert "tags_0" not in result.rows[-1]


class Watching(Callback):
    """Reads the clients' memories after every round, and may stop a run."""

    def __init__(self, out: Path, stop_after: int | None = None) -> None:
        self.out, self.stop_after, self.tags = out, stop_after, []

    def on_round_end(self, row: MetricsRow) -> None:
        newest: dict[str, Path] = {path.name[:6]: path for path in sorted(memory_files(self.out))}
        self.tags.append({client: load_file(path)["tags/tags"] for client, path in newest.items()})
        if row["round"] == self.stop_after:
            raise KeyboardInterrupt


def memory_files(out: Path) -> list[Path]:
    return list((out / "checkpoint" / "client_state").glob("*.safetensors"))


def latest_memories(out: Path) -> dict[str, Tensors]:
    return {path.name[:6]: load_file(path) for path in sorted(memory_files(out))}


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    round_state, yours = latest_memories(first), latest_memories(second)
    assert all((memory["tags/tags"] >= 0).any() for memory in round_state.values())
    assert round_state.keys() == yours.keys()
    assert all(
        torch.equal(round_state[c][name], yours[c][name]) for c in round_state for name in ("tags/tags", "tags/carry")
    )


def test_tags_are_permanent_and_survive_an_interruption(tmp_path: Path) -> None:
    experiment = small(**EARLY | {"training__rounds": 5})
    whole = Watching(tmp_path / "whole")
    result = run(experiment, tmp_path / "whole", callback=whole)
    for before, after in zip(whole.tags, whole.tags[1:], strict=False):
        for client, tags in before.items():
            assert torch.equal(after[client][tags >= 0], tags[tags >= 0])
    made = [row.get("tags_0", 0) + row.get("tags_1", 0) for row in result.rows]
    assert made[0] == 0 < made[1] < made[2] < made[4]
    assert 0 < result.rows[-1]["tag_precision"] <= 100
    recorded = load_file(tmp_path / "whole" / "records" / "000005.safetensors")
    assert recorded["tags_made"].sum() == made[4]

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "stopped", callback=Watching(tmp_path / "stopped", stop_after=3))
    resume(tmp_path / "stopped")
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_a_killed_run_has_the_same_tags_and_weights(tmp_path: Path) -> None:
    experiment = small(**EARLY | {"training__rounds": 12, "engine__workers": 1})
    file = tmp_path / "experiment.toml"
    file.write_text(experiment.to_toml())
    run(experiment, tmp_path / "whole")
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", "from fedmll.cli.main import main; main()", "run", str(file), "--out", str(killed)],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    rows = killed / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    resume(killed)
    assert_same(tmp_path / "whole", killed)


def test_class_without_positives_at_its_annotating_clients_is_named_truthfully() -> None:
    """Three clients annotate "two", and the partition gave its samples to the fourth."""
    experiment = small(
        method__name="fedmlp",
        partition__kind="labels-per-client",
        partition__labels_per_client=4,
        partition__clients=4,
        annotation__kind="missing",
        annotation__missing=3,
    )
    assert federation.build(experiment).annotated[:, 2].sum() == 3
    with pytest.raises(ConfigError) as refused:
        run(experiment)
    assert "a client that annotates the class and has positives of it, and there is none for two." in str(refused.value)
    assert "No client annotates" not in str(refused.value)
