"""The final model at each site: the same bits as the server's, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, NAMES, Consortium
from fake_grid import FakeNode, RecordingCallback, consortium, drive, fast_polling, make_grid, make_site  # noqa: F401  (fixtures)
from safetensors.torch import load, save
from typer.testing import CliRunner

from fedmll.cli.main import app as command
from fedmll.core.message import Message
from fedmll.deploy.error_codes import SiteError
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.model_delivery import ModelDelivery, receive_model
from fedmll.deploy.site import worker as site_worker
from fedmll.deploy.site.site_config import Site, read_site_file, write_site_file
from fedmll.deploy.site.worker import SiteWorker
from fedmll.inference.model_file import SavedModel, build_metadata, load_model


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, consortium: Consortium) -> SimpleNamespace:  # noqa: F811
    """A run of one round that is over; site-b was away at the end."""
    patch = pytest.MonkeyPatch()
    fast_polling.__wrapped__(patch)  # type: ignore[attr-defined]
    folder, hear = tmp_path_factory.mktemp("over"), RecordingCallback()
    grid = make_grid(consortium, folder)
    hear.at_round = {1: lambda: setattr(grid.nodes[1], "status", "offline")}
    result = drive(consortium, grid, folder / "out", hear, training__rounds=1, min_clients=2)
    patch.undo()
    return SimpleNamespace(folder=folder, grid=grid, said=hear.said, result=result, model=folder / "out")


def same(first: SavedModel, second: SavedModel) -> bool:
    return first.weights.keys() == second.weights.keys() and all(
        torch.equal(first.weights[name], tensor) for name, tensor in second.weights.items()
    )


def test_every_site_has_the_servers_model_bit_for_bit(over: SimpleNamespace) -> None:
    servers = load_model(over.folder / "out" / "model.safetensors")
    for name in ("site-a", "site-c"):
        file = over.folder / name / "model.safetensors"
        mine = load_model(file)
        assert same(mine, servers)
        assert mine.classes == servers.classes == tuple(CLASSES)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "test" not in json.dumps(mine.description["experiment"]["data"])  # the server's data is its own
        images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
        assert np.array_equal(mine.predict(images), servers.predict(images))


def test_a_delivered_model_predicts_from_the_command_line(over: SimpleNamespace, consortium: Consortium) -> None:  # noqa: F811
    image = consortium.folder / "images" / "00000.png"
    done = CliRunner().invoke(command, ["predict", str(over.folder / "site-a" / "model.safetensors"), str(image)])
    assert done.exit_code == 0, done.output


def test_a_disconnected_site_is_named_with_the_models_file(over: SimpleNamespace) -> None:
    file = over.folder / "out" / "model.safetensors"
    assert f"site-b did not receive the model. It is in {file}; send it to them" in over.said
    assert not (over.folder / "site-b" / "model.safetensors").exists()


def test_the_model_is_sent_once_to_each(over: SimpleNamespace) -> None:
    assert [name for kind, name in over.grid.log if kind == "query.model"] == ["site-a", "site-c"]
    assert over.grid.log[-2:] == [("query.bye", "site-a"), ("query.bye", "site-c")]


# ---- one site


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, consortium: Consortium) -> SiteWorker:  # noqa: F811
    experiment = resolve_for_sites(consortium.server(partition__holdout=0.3), (1, 8, 8))
    setup = StudySetup(
        run="run1", experiment=settings_for_sites(experiment), classes=tuple(CLASSES), shape=(1, 8, 8), clients=3
    )
    return SiteWorker(make_site(consortium, "site-a", tmp_path_factory.mktemp("site")), setup, lambda text: None)


def content_of(worker: SiteWorker, change: Callable[[dict, dict], None] = lambda tensors, told: None) -> Message:
    """What a server would send of this site's own model, changed."""
    trainer = worker.trainer
    tensors = trainer.named(Message(trainer.weights.dump())) | trainer.frozen()
    told: dict[str, Any] = {"format": 1, "classes": list(CLASSES), "round": 2, "thresholds": None, "calibration": None}
    change(tensors, told)
    raw = save({name: tensor.clone() for name, tensor in tensors.items()}, build_metadata(tensors, told))
    return Message({"model": torch.frombuffer(bytearray(raw), dtype=torch.uint8)})


def receive(worker: SiteWorker, message: Message, digest: str, folder: Path) -> SavedModel:
    return receive_model(message, digest=digest, trainer=worker.trainer, window=None, folder=folder)


def digest(message: Message) -> str:
    return hashlib.sha256(message["model"].numpy().tobytes()).hexdigest()


def test_a_wrong_digest_is_rejected_and_the_old_file_stays(worker: SiteWorker, tmp_path: Path) -> None:
    good = content_of(worker)
    receive(worker, good, digest(good), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    changed = Message({"model": good["model"].clone()})
    changed["model"][-1] ^= 1
    for wrong in (digest(good), None, 7):
        with pytest.raises(SiteError, match="its SHA-256 digest differs"):
            receive(worker, changed, wrong, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def put(name: str, value: Any) -> Callable[[dict, dict], None]:
    return lambda tensors, told: told.__setitem__(name, value)


def spoil(tensors: dict, told: dict) -> None:
    tensors["head.bias"][3] = torch.nan


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("classes", CLASSES[::-1]), "its classes are not those of the study"),
        (put("classes", None), "its classes are not those of the study"),
        (put("round", "2"), "does not say of which round"),
        (put("thresholds", [0.5] * 9), "its thresholds do not have the shape"),
        (put("thresholds", [0.5] * 9 + ["a"]), "its thresholds do not have the shape"),
        (put("thresholds", [0.5] * 9 + [float("inf")]), "its thresholds do not have the shape"),
        (put("calibration", [0.5] * 10), "its calibration do not have the shape"),
        (put("thresholds_for", {"a": 1}), "what its thresholds are for"),
        (put("format", 99), "format version 99"),
        (spoil, r"'head.bias' has values that are not finite"),
        (lambda tensors, told: tensors.pop("head.bias"), "'head.bias' is missing"),
        (lambda tensors, told: tensors.update(extra=torch.zeros(1)), "'extra' is no tensor of this model"),
        (lambda tensors, told: tensors.update({"head.bias": torch.zeros(11)}), r"'head.bias' is torch.float32 \(11,\)"),
        (
            lambda tensors, told: tensors.update({"head.bias": torch.zeros(10).double()}),
            r"'head.bias' is torch.float64",
        ),
    ],
)
def test_a_model_of_another_experiment_is_rejected(
    worker: SiteWorker, tmp_path: Path, change: Callable[[dict, dict], None], reason: str
) -> None:
    sent = content_of(worker, change)
    with pytest.raises(SiteError, match=reason) as refusal:
        receive(worker, sent, digest(sent), tmp_path)
    assert refusal.value.code == "model"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("raw", [b"", b"\x80\x04N.", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_bytes_that_are_no_model_are_rejected(worker: SiteWorker, tmp_path: Path, raw: bytes) -> None:
    sent = Message({"model": torch.tensor(list(raw), dtype=torch.uint8)})
    with pytest.raises(SiteError, match="cannot be stored"):
        receive(worker, sent, digest(sent), tmp_path)
    with pytest.raises(SiteError, match="should contain a model and does not"):
        receive(worker, Message(), digest(sent), tmp_path)


def test_a_delivered_model_has_thresholds_calibration_and_the_sites_window(worker: SiteWorker, tmp_path: Path) -> None:
    cuts = [place / 20 for place in range(10)]
    by = [[1.5, -0.25]] * 10

    def change(tensors: dict, told: dict) -> None:
        told.update(thresholds=cuts, thresholds_for="recall=0.9", calibration=by)

    sent = content_of(worker, change)
    receive_model(sent, digest=digest(sent), trainer=worker.trainer, window=(0.0, 4095.0), folder=tmp_path)
    mine = load_model(tmp_path / "model.safetensors")
    assert mine.tuned_thresholds.tolist() == cuts  # type: ignore[union-attr]
    assert mine.calibration.tolist() == by  # type: ignore[union-attr]
    assert mine.description["thresholds_for"] == "recall=0.9"
    assert mine.description["window"] == [0.0, 4095.0]


def test_a_site_may_have_thresholds_of_its_own(over: SimpleNamespace, worker: SiteWorker) -> None:
    model = load_model(over.folder / "out" / "model.safetensors")
    own = {"site-c": {"thresholds": [0.25] * 10, "calibration": [[2.0, 0.0]] * 10, "thresholds_for": "f1"}}
    handed = ModelDelivery(worker.trainer, model, own)
    peers = {name: SimpleNamespace(name=name) for name in NAMES}
    told = {}
    for name, peer in peers.items():
        message, info = handed.message_for(peer)  # type: ignore[arg-type]
        raw = message["model"].numpy().tobytes()
        assert info == {"digest": hashlib.sha256(raw).hexdigest()}
        assert all(torch.equal(model.weights[key], tensor) for key, tensor in load(raw).items())
        told[name] = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["fedmll"])
    assert told["site-a"]["thresholds"] is None
    assert told["site-c"]["thresholds"] == [0.25] * 10
    assert told["site-c"]["calibration"] == [[2.0, 0.0]] * 10
    assert handed.message_for(peers["site-a"])[0] is handed.message_for(peers["site-b"])[0]  # type: ignore[arg-type]


def test_a_large_model_has_more_time(over: SimpleNamespace, worker: SiteWorker) -> None:
    model = load_model(over.folder / "out" / "model.safetensors")
    assert ModelDelivery(worker.trainer, model).timeout(600) == 600
    large = replace(model, weights={"w": torch.empty(250_000_000, dtype=torch.float32, device="meta")})
    assert ModelDelivery(worker.trainer, large).timeout(600) == 4000


def test_with_private_labels_a_site_gets_its_own_rows(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", training__rounds=1, method__name="private-fedavg", method__loss="sigmoid")
    whole = load_model(tmp_path / "out" / "model.safetensors")
    mine = load_model(tmp_path / "site-c" / "model.safetensors")
    assert mine.classes == tuple(label for label in CLASSES if label[-1] not in "257")
    rows = [whole.classes.index(label) for label in mine.classes]
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
    assert np.array_equal(mine.weights["head.weight"], whole.weights["head.weight"][rows])
    assert np.allclose(mine.predict(images), whole.predict(images)[:, rows], atol=1e-6)
    assert "digit-5" not in (tmp_path / "site-c" / "model.safetensors").read_bytes().decode("latin-1")


def test_a_site_that_rejects_the_model_is_named(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(message: Message, *, digest: object, folder: Path, **more: Any) -> SavedModel:
        announced = "0" * 64 if folder.name == "site-a" else digest
        return receive_model(message, digest=announced, folder=folder, **more)

    monkeypatch.setattr(site_worker.model_delivery, "receive_model", other)
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=1)
    reason = "it rejected the model that was sent to it (details are shown at the site)"
    assert f"round 1: the reply of site-a is rejected: {reason}" in hear.said
    assert [text for text in hear.said if text.startswith("site-a did not receive the model")]


def test_a_site_file_keeps_the_folder_of_the_model(tmp_path: Path) -> None:
    site = Site(
        name="s",
        csv=tmp_path / "l.csv",
        images=tmp_path,
        state_dir=tmp_path / "m",
        out=tmp_path / "out",
        validation_only=True,
    )
    write_site_file(site, tmp_path / "site.json")
    assert read_site_file(tmp_path / "site.json") == site
    write_site_file(replace(site, out=None), tmp_path / "site.json")
    assert read_site_file(tmp_path / "site.json").out is None
