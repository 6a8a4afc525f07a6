import json
from pathlib import Path

import pytest
import torch

from fedmll.core.errors import CheckpointError
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
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "000004.json", "000004.safetensors", "000005.json", "000005.safetensors",
    ]  # fmt: skip
    assert checkpoint.referenced_client_states(tmp_path) == {(3, 4), (3, 5)}


@pytest.mark.parametrize("name", ["000002.safetensors", "000002.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    checkpoint.save_checkpoint(tmp_path, make(2))
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-3] ^= 1
        path.write_bytes({"flip": bytes(content), "cut": bytes(content[:-4]), "empty": b""}[damage])
    loaded, warnings = checkpoint.load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert loaded.round == 1
    if (name, damage) != ("000002.json", "gone"):  # without its JSON it never was a checkpoint
        assert len(warnings) == 1
        assert "damaged" in warnings[0]


def test_changed_json_is_noticed(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, make(1))
    path = tmp_path / "000001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"round": 9}))
    assert checkpoint.load_checkpoint(tmp_path, "abc")[0] is None


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
    (tmp_path / "000002.json").write_text("{")  # damaged: whose it is cannot be told
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
    (tmp_path / "000002.json").write_text("{}")
    assert checkpoint.referenced_client_states(tmp_path) is None
    checkpoint.load_checkpoint(tmp_path, "abc")
    assert (tmp_path / "000002.json.damaged").read_text() == "{}"
    assert (tmp_path / "000002.safetensors.damaged").exists()
    assert checkpoint.referenced_client_states(tmp_path) is None
    checkpoint.save_checkpoint(tmp_path, make(3))
    assert (tmp_path / "000002.json.damaged").exists()
