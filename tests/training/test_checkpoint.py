"""Checkpoints: the last two whole ones, with checksums of everything that is read back."""

from pathlib import Path

import pytest
import torch

from fedmll.core import tensor_files
from fedmll.core.errors import CheckpointError, ConfigError
from fedmll.training import checkpoint
from fedmll.training.checkpoint import Checkpoint


def make(round: int) -> Checkpoint:
    return Checkpoint(
        round=round,
        state={"weights": torch.full((5,), float(round))},
        fingerprint="abc",
        best={"round": 1.0},
        client_states={3: round},
    )


def test_saved_checkpoint_is_loaded(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, make(7))
    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert (loaded.round, loaded.best, loaded.client_states, warnings) == (7, {"round": 1.0}, {3: 7}, [])
    assert torch.equal(loaded.state["weights"], torch.full((5,), 7.0))


def test_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for round in range(1, 6):
        checkpoint.save_checkpoint(tmp_path, make(round))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000004.safetensors", "000005.safetensors"]
    assert checkpoint.referenced_client_states(tmp_path) == {(3, 4), (3, 5)}


@pytest.mark.parametrize("damage", ["flip values", "flip header", "cut", "empty"])
def test_damaged_checkpoint_is_set_aside_with_a_warning(tmp_path: Path, damage: str) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    checkpoint.save_checkpoint(tmp_path, make(2))
    path = tmp_path / "000002.safetensors"
    content = bytearray(path.read_bytes())
    place = len(content) - 3 if damage == "flip values" else content.index(b"fingerprint") + 16
    content[place] ^= 1
    path.write_bytes({"cut": bytes(content[:-4]), "empty": b""}.get(damage, bytes(content)))
    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc")
    assert loaded is not None and loaded.round == 1
    assert len(warnings) == 1 and "000002.safetensors is damaged" in warnings[0]
    assert warnings[0].endswith("The run continues after round 1; its result is the same.")
    assert (tmp_path / "000002.safetensors.damaged-1").exists()


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Also in the header: a bit that makes no difference to what is read is the only exception."""
    checkpoint.save_checkpoint(tmp_path, make(2))
    path = tmp_path / "000002.safetensors"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            facts, tensors = tensor_files.read_facts(path), tensor_files.read_tensors(path)
        except tensor_files.DamagedFile:
            continue
        assert facts["round"] == 2 and facts["client_states"] == {"3": 2}
        assert torch.equal(tensors["weights"], make(2).state["weights"])


def test_without_a_whole_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    (tmp_path / "000001.safetensors").write_bytes(b"")
    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc")
    assert loaded is None and "starts again from round 1" in warnings[0]


def test_damaged_client_state_makes_its_checkpoints_unusable(tmp_path: Path) -> None:
    for round in (1, 2):
        checkpoint.save_checkpoint(tmp_path, make(round))
    asked: list[tuple[int, int]] = []

    def find_damaged_state(client: int, round: int) -> str | None:
        asked.append((client, round))
        return "client_state/3 is missing." if round == 2 else None

    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc", find_damaged_state)
    assert loaded is not None and loaded.round == 1
    assert "000002.safetensors cannot be used: client_state/3 is missing." in warnings[0]
    assert asked == [(3, 2), (3, 1)]


def test_checkpoint_of_another_experiment_is_refused(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    with pytest.raises(CheckpointError, match="another experiment"):
        checkpoint.load_checkpoint(tmp_path, "xyz")


def test_without_checkpoints_nothing_is_loaded(tmp_path: Path) -> None:
    assert checkpoint.load_checkpoint(tmp_path / "nothing", "abc") == (None, [])


def test_check_fingerprint_reads_no_tensors(tmp_path: Path) -> None:
    checkpoint.check_fingerprint(tmp_path, "abc")  # none yet
    checkpoint.save_checkpoint(tmp_path, make(1))
    checkpoint.check_fingerprint(tmp_path, "abc")
    with pytest.raises(CheckpointError, match="another experiment"):
        checkpoint.check_fingerprint(tmp_path, "xyz")
    (tmp_path / "000002.safetensors").write_text("{")  # damaged: whose it is cannot be told
    checkpoint.check_fingerprint(tmp_path, "abc")


def test_another_format_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", checkpoint.FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match=rf"version {checkpoint.FORMAT_VERSION - 1}; this fedmll reads"):
        checkpoint.load_checkpoint(tmp_path, "abc")


def test_rounds_of_client_states_are_loaded(tmp_path: Path) -> None:
    """JSON turns numbers that are keys into strings, which sort differently: 10 before 2."""
    states = {client: 100 + client for client in range(12)}
    checkpoint.save_checkpoint(
        tmp_path, Checkpoint(round=120, state={"weights": torch.zeros(1)}, fingerprint="abc", client_states=states)
    )
    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert (loaded.client_states, warnings) == (states, [])
    assert checkpoint.referenced_client_states(tmp_path) == set(states.items())


def test_damaged_checkpoint_may_refer_to_any_client_state(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    checkpoint.save_checkpoint(tmp_path, make(2))
    (tmp_path / "000002.safetensors").write_text("{}")
    assert checkpoint.referenced_client_states(tmp_path) is None
    checkpoint.load_checkpoint(tmp_path, "abc")
    assert (tmp_path / "000002.safetensors.damaged-1").read_text() == "{}"
    assert checkpoint.referenced_client_states(tmp_path) is None
    checkpoint.save_checkpoint(tmp_path, make(3))
    assert (tmp_path / "000002.safetensors.damaged-1").exists()


class TestDiscardCheckpoints:
    """The checkpoints after rounds 4 and 5 exist."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for round in (4, 5):
            checkpoint.save_checkpoint(tmp_path, make(round))
        return tmp_path

    @pytest.mark.parametrize(("from_round", "left"), [(6, [4, 5]), (5, [4]), (1, [])])
    def test_this_round_and_later_ones_are_deleted(self, folder: Path, from_round: int, left: list[int]) -> None:
        checkpoint.discard_checkpoints(folder, from_round)
        assert sorted(path.name for path in folder.iterdir()) == [f"00000{round}.safetensors" for round in left]

    @pytest.mark.parametrize("from_round", [2, 4, 7])
    def test_without_the_checkpoint_before_it_nothing_is_deleted(self, folder: Path, from_round: int) -> None:
        possible = "Possible here: --from-round 1 or --from-round 5 or --from-round 6."
        with pytest.raises(ConfigError, match=f"after round {from_round - 1}, .*{possible}"):
            checkpoint.discard_checkpoints(folder, from_round)
        assert len(list(folder.iterdir())) == 2
