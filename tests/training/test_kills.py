"""kill -9 at any moment, then resume: the same weights, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import small

from fedmll import Experiment, resume, run
from fedmll.core.files import checksum, is_leftover
from fedmll.core.message import Tensors
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.framework.method import Method
from fedmll.methods.parts.averaging import WeightedAverage

EXPERIMENT = {
    "training__rounds": 8,
    "engine__workers": 2,
    "data__limit": 300,
    "method__name": "test-drifting",
}


class DriftingMean(WeightedAverage):
    """Has a client state that the weights depend on: a resumed run must find the right one."""

    name: ClassVar[str] = "test-drifting-mean"

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        reply, memory = super().on_round_end(client_round, round_state), self.client_state(client_round)
        memory["drift"] = 0.5 * memory.get("drift", torch.zeros_like(reply["weights"])) + reply["weights"]
        return reply | {"weights": 0.5 * reply["weights"] + 0.25 * memory["drift"]}


class Drifting(Method):
    name: ClassVar[str] = "test-drifting"
    average = DriftingMean


def in_child(client_round: Callable[[], object]) -> int:
    """Run a function in a forked process, which ends without output."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            client_round()
        finally:
            os._exit(0)
    return child


def go_on(experiment: Experiment, out: Path) -> None:
    resume(out) if (out / "experiment.toml").exists() else run(experiment, out)


def same_weights(first: Path, second: Path) -> bool:
    return checksum(first / "model.safetensors") == checksum(second / "model.safetensors")


@pytest.mark.slow
def test_resume_after_kills_at_random_moments(tmp_path: Path) -> None:
    experiment = small(**EXPERIMENT)
    run(experiment, tmp_path / "whole")
    moments, kills, runs = random.Random(1), 0, 0
    rounds_at_kill = set()
    while kills < 24:
        out = tmp_path / f"killed-{runs}"
        runs += 1
        while not (out / "summary.json").exists():
            child = in_child(lambda out=out: go_on(experiment, out))  # type: ignore[misc]
            deadline = time.monotonic() + moments.uniform(0.02, 1.2)
            while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                rounds_at_kill.add(len(list((out / "checkpoint").glob("*.safetensors"))))
            except (ProcessLookupError, ChildProcessError):
                pass  # it had finished
            if kills >= 24:
                go_on(experiment, out)
        assert same_weights(tmp_path / "whole", out)
    assert len(rounds_at_kill) > 1  # some kills came before the first checkpoint, some after the second


@pytest.mark.slow
def test_resume_after_a_kill_at_every_step_of_writing_a_checkpoint(tmp_path: Path) -> None:
    """Kill the process at the n-th file that reaches the disk (before or just after it is renamed), for every n of
    two rounds: client states, tensors, JSON."""
    experiment = small(**EXPERIMENT | {"training__rounds": 2, "engine__workers": 0})
    run(experiment, tmp_path / "whole")
    died = 0
    for number in range(1, 60):
        out = tmp_path / f"step-{number}"

        def die_at(number: int = number, out: Path = out) -> None:
            count, real = 0, os.fsync

            def counting(descriptor: int) -> None:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(descriptor)

            os.fsync = counting  # in the child only
            run(experiment, out)

        _, status = os.waitpid(in_child(die_at), 0)
        if not os.WIFSIGNALED(status):
            break
        died += 1
        go_on(experiment, out)
        assert same_weights(tmp_path / "whole", out), f"died at write {number}"
        assert not [path for path in out.rglob("*") if is_leftover(path)]
    assert died > 20


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_continue(tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fedmll", "run", "--out", str(out), "--rounds", "400", "--workers", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 60
    while not list((out / "checkpoint").glob("*.safetensors")) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, how)  # as a terminal does: to the workers too
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"fedmll resume {out}" in said.replace("\n", "")
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no worker is left
