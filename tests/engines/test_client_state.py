"""Client states on disk: those that the kept checkpoints refer to exist, and a checkpoint looks only at changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedmll.engines.client_state import KEPT, ClientStateStore, StateVersions
from fedmll.engines.simulation import SimulationAudit
from fedmll.runs.run_folder import RunFolder
from fedmll.testing import experiment
from fedmll.training import checkpoint
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import resume, run

CLIENTS = 12


def on_disk(store: ClientStateStore) -> StateVersions:
    return {(int(p.name[:6]), int(p.name[7:13])) for p in store.folder.iterdir()}


def remember(store: ClientStateStore, clients: range, round: int) -> None:
    for client in clients:
        store.write(store.path(client, round), {"part/x": torch.tensor([client, round])}, durable=False)
        store.written(client, round)


def of(store: ClientStateStore) -> StateVersions:
    return set(store.latest.items())


def unasked() -> StateVersions | None:
    raise AssertionError("the checkpoints are not read")


@pytest.mark.parametrize("every", [1, 3])
def test_states_of_the_last_two_checkpoints_are_kept(tmp_path: Path, every: int) -> None:
    store, checkpoints = ClientStateStore(tmp_path), [StateVersions()]
    for round in range(1, 13):
        remember(store, range(round % 4, CLIENTS, 1 + round % 3), round)
        if round % every == 0:
            checkpoints.append(of(store))
            store.checkpointed(unasked)
            assert on_disk(store) == checkpoints[-1] | checkpoints[-2]
        assert len(on_disk(store)) <= CLIENTS * (KEPT + 1)  # also between two of them


class Stop(Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if round == self.round and done == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 2])
def test_resumed_run_keeps_the_states_of_its_checkpoints(tmp_path: Path, every: int) -> None:
    made = experiment(
        method__name="scaffold", training__optimizer="sgd", training__rounds=8, engine__checkpoint_every=every,
        participation__count=3, partition__clients=6,
    )  # fmt: skip
    for stop, go in ((4, lambda watch: run(made, tmp_path / "run", callback=watch)),
                     (7, lambda watch: resume(tmp_path / "run", callback=watch))):  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            go(Stop(stop))
    found = resume(tmp_path / "run").weights
    assert on_disk(ClientStateStore(RunFolder(tmp_path / "run").client_state_folder)) == (
        checkpoint.referenced_client_states(tmp_path / "run" / "checkpoint")
    )
    assert all(torch.equal(tensor, found[name]) for name, tensor in run(made).weights.items())


def test_checkpoint_deletes_without_listing_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, deleted, real = ClientStateStore(tmp_path), list[str](), Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        deleted.append(path.name)
        real(path, missing_ok=missing_ok)

    remember(store, range(CLIENTS), 1)
    store.checkpointed(unasked)
    for round in (2, 3, 4):
        remember(store, range(2), round)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", watched)
            patched.setattr(Path, "glob", lambda *_: pytest.fail("the folder is not listed"))
            store.checkpointed(unasked)
    assert deleted == [f"{client:06d}.{round:06d}.safetensors" for round in (1, 2) for client in range(2)]


def test_no_state_is_deleted_next_to_a_damaged_checkpoint(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.keep_only(None)
    for round in range(1, 6):
        remember(store, range(CLIENTS), round)
        if round != 2:  # a round between checkpoints
            store.checkpointed(unasked)
    assert len(on_disk(store)) == CLIENTS * 5
    store.keep_only(of(store))
    assert on_disk(store) == of(store)


def test_state_written_twice_in_one_round_is_kept(tmp_path: Path) -> None:
    """As when a round is repeated."""
    store = ClientStateStore(tmp_path)
    remember(store, range(3), 1)
    remember(store, range(3), 1)
    for _ in range(3):
        store.checkpointed(unasked)
    assert on_disk(store) == {(client, 1) for client in range(3)}


def test_audit_reads_only_new_states_and_counts_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = list[str](), ClientStateStore.read

    def counted(store: ClientStateStore, path: Path | None) -> dict[str, torch.Tensor]:
        reads.append(str(path))
        return read(store, path)

    audits, records = list[tuple[int, int]](), SimulationAudit.records

    def compared(self: SimulationAudit) -> dict[str, float | torch.Tensor]:
        reads.clear()
        found, own = records(self), len(reads)
        again = records(SimulationAudit(self.method, self.data, self.store))  # one that knows nothing yet
        assert found.keys() == again.keys()
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(again[key])) for key in found)
        audits.append((own, len(reads) - own))
        return found

    monkeypatch.setattr(ClientStateStore, "read", counted)
    monkeypatch.setattr(SimulationAudit, "records", compared)
    result = run(
        experiment(
            method__name="fedmlp", method__t1=1, method__T0=0.2, method__T1=0.3, annotation__kind="missing",
            annotation__missing=6, participation__count=2, training__rounds=6, partition__clients=8,
        )
    )  # fmt: skip
    assert max(new for new, _ in audits) <= 2 and audits[-1][1] > 2
    assert "tag_precision" in result.rows[-1]
