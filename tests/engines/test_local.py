"""The local engine: the same bits for any number of workers; dead workers, errors and interrupts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import small

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import build
from fedmll.engines.local import LocalEngine
from fedmll.methods.framework.base import Aggregator, Part, PartOptions, Records, TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import run

PRIVATE = {"method__name": "private-fedavg", "method__loss": "sigmoid"}


class Counting(Part):
    """Counts its rounds in the client state and sends the count."""

    name: ClassVar[str] = "test-counting"

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        memory = self.client_state(client_round)
        memory["rounds"] = memory.get("rounds", torch.zeros(1)) + 1
        return {"rounds": memory["rounds"]}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"rounds": TensorSpec((1,), low=1)}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return SumAggregator()


class SumAggregator(Aggregator):
    total = 0.0

    def add(self, peer: ClientInfo, reply: Message) -> None:
        self.total += reply["rounds"].item()

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return {}, {"remembered": self.total}


class Remembering(Method):
    name: ClassVar[str] = "test-remembering"
    parts = (UnknownAsNegative, Counting)


class Killing(Part):
    """Kills its worker in round 2 at client c001, as the out-of-memory killer does: always, or only the first time."""

    name: ClassVar[str] = "test-killing"

    class Options(PartOptions):
        flag: str = ""  # a file: die while it does not exist
        always: bool = False

    def on_round_start(self, client_round: ClientRound) -> None:
        flag = Path(self.options.flag)
        if (
            client_round.number == 2
            and client_round.client.name == "c001"
            and (self.options.always or not flag.exists())
        ):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Method):
    name: ClassVar[str] = "test-deadly"
    parts = (UnknownAsNegative, Killing)


class Bug(Part):
    name: ClassVar[str] = "test-bug"

    def on_round_start(self, client_round: ClientRound) -> None:
        raise ValueError("a bug in a method")


class Broken(Method):
    name: ClassVar[str] = "test-broken"
    parts = (UnknownAsNegative, Bug)


def weights_of(experiment: Experiment) -> dict[str, torch.Tensor]:
    return run(experiment).weights


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavg-pl", "centralized"])
def test_same_bits_for_any_number_of_workers(method: str) -> None:
    runs = [weights_of(small(method__name=method, engine__workers=w)) for w in (0, 1, 2, 3)]
    assert all(same(runs[0], other) for other in runs[1:])
    assert not same(runs[0], weights_of(small(method__name=method, seed=1)))


def test_more_clients_than_held_results_and_partial_participation() -> None:
    setting = {"partition__clients": 20, "partition__kind": "iid", "participation__count": 15, "data__limit": 200}
    one, two = (weights_of(small(**setting, engine__workers=w)) for w in (1, 2))
    assert same(one, two)


def test_client_state_stays_with_its_client(tmp_path: Path) -> None:
    for workers in (0, 2):
        result = run(
            small(method__name="test-remembering", training__rounds=3, engine__workers=workers), tmp_path / str(workers)
        )
        assert [row["remembered"] for row in result.rows] == [4, 8, 12]  # 4 clients × rounds so far
        kept = sorted(p.name for p in (tmp_path / str(workers) / "checkpoint" / "client_state").iterdir())
        # what the last two checkpoints refer to, no more
        assert kept == [f"{client:06d}.{round:06d}.safetensors" for client in range(4) for round in (2, 3)]


def test_client_states_are_synced_once_per_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the checkpoint that refers to them; a method without client states never waits."""
    events = list[str]()
    real = os.fsync

    def counting(descriptor: int) -> None:
        events.append("file")
        real(descriptor)

    monkeypatch.setattr("os.fsync", counting)
    monkeypatch.setattr("fedmll.core.files.sync_disk", lambda folder: events.append(folder.name))
    checkpoints = {"training__rounds": 4, "engine__checkpoint_every": 2}
    run(small(**checkpoints), tmp_path / "plain")
    assert set(events) == {"file"}
    alone = len(events)
    events.clear()
    run(small(method__name="test-remembering", **checkpoints), tmp_path / "remembering")
    assert events.count("client_state") == 2 and events.count("file") == alone
    assert (
        events[events.index("client_state") + 1 :].count("file") >= 8
    )  # two checkpoints of two files, with their folder


def test_dead_worker_is_replaced_and_its_client_trained_again(tmp_path: Path) -> None:
    undisturbed = weights_of(small(method__name="test-deadly", method__flag=str(tmp_path), engine__workers=2))
    disturbed = weights_of(small(method__name="test-deadly", method__flag=str(tmp_path / "flag"), engine__workers=2))
    assert (tmp_path / "flag").exists()
    assert same(undisturbed, disturbed)


def test_error_names_a_client_that_kills_its_worker_twice(tmp_path: Path) -> None:
    experiment = small(
        method__name="test-deadly", method__flag=str(tmp_path / "f"), method__always=True, engine__workers=2
    )
    with pytest.raises(ClientError, match=r"client c001 in round 2 was killed by signal 9"):
        run(experiment, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "000001.safetensors").exists()  # what was good stays


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_a_part_names_the_part_the_hook_and_the_line(workers: int) -> None:
    said = (
        r"The part 'test-bug' failed in `on_round_start` with ValueError: a bug in a method \(test_local.py, line \d+\)"
    )
    with pytest.raises(ConfigError, match=said):
        run(small(method__name="test-broken", engine__workers=workers))


def test_error_names_a_diverging_client(tmp_path: Path) -> None:
    experiment = small(training__optimizer="sgd", training__lr=1e30, engine__workers=2)
    with pytest.raises(ClientError, match=r"client c00\d became nan in round 1"):
        run(experiment, tmp_path / "run")
    assert "stopped" in (tmp_path / "run" / "log.txt").read_text()


def test_no_process_is_left_behind() -> None:
    class Stop(Callback):
        def on_client_end(self, round: int, done: int, total: int) -> None:
            if round == 2 and done == 1:
                raise KeyboardInterrupt

    import multiprocessing

    with pytest.raises(KeyboardInterrupt):
        run(small(engine__workers=2), callback=Stop())
    assert multiprocessing.active_children() == []


def test_predictions_do_not_depend_on_the_chunks(tmp_path: Path) -> None:
    """Engine predictions equal the model applied to each sample of the test data, in order."""
    data = build(small(engine__workers=2))
    engine = LocalEngine(data, tmp_path)
    try:
        state = engine.initial_state()
        (scores,) = engine.predict(engine.trainer.method.final_model(state), "test")
        model = engine.trainer.model.eval()
        pixels = torch.from_numpy(data.test.store[data.test.rows]).float() / 255
        with torch.no_grad():
            expected = torch.sigmoid(model((pixels - 0.5) / 0.5)).numpy()
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.parametrize(("method", "times"), [({"method__name": "fedavg"}, 1), (PRIVATE, 4)])
def test_reply_spec_is_computed_once_for_equal_messages(
    monkeypatch: pytest.MonkeyPatch, method: dict[str, str], times: int
) -> None:
    """With private labels each of the four clients is sent its own rows."""
    asked, expects = list[int](), Method.reply_spec

    def counted(self: Method, sent: Message, round: int) -> dict[str, TensorSpec]:
        asked.append(round)
        return expects(self, sent, round)

    monkeypatch.setattr(Method, "reply_spec", counted)
    run(small(engine__workers=1, **method))
    assert asked == [1] * times + [2] * times


def test_cuda_is_refused_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="no CUDA device"):
        run(small(engine__device="cuda"))
