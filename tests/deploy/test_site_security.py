# ruff: noqa: F811 (fixtures)
"""A site trusts nobody: what a server may ask for, what leaves, and what stays on the site's disk."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import what_leaves
from consortium import CLASSES, Consortium, write_csv
from fake_grid import FakeNode, RecordingCallback, drive, fast_polling, make_grid  # noqa: F401  (a fixture)
from flwr.app import Message as FlowerMessage
from PIL import Image
from rich.console import Console
from site_helpers import consortium, fresh_client_app, make_setup, make_site_c, send_to_site  # noqa: F401 (fixtures)
from what_leaves import DOCUMENT, SITE, documented, rows_of

from fedmll.cli.display import site_table
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError, ConfigError, DataError, FederationError, ReplyRejected
from fedmll.core.message import Message
from fedmll.core.text import confirm_at_terminal, printable
from fedmll.data.federation import build
from fedmll.data.fingerprint import LARGEST_READ, compute_digest
from fedmll.data.images.cache import cache_folder, cached_array, image_cache_in, image_folder
from fedmll.deploy import experiment_for_sites, file_references
from fedmll.deploy.error_codes import (
    FLOWER_ERROR_CODE,
    RejectionCode,
    SiteError,
    SiteErrorCode,
    error_code,
    format_rejection,
)
from fedmll.deploy.experiment_for_sites import StudySetup
from fedmll.deploy.flower import child_processes, client_app, executor
from fedmll.deploy.flower.client_app import BYE, HELLO, join_state
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.server import rehearsal
from fedmll.deploy.site import join, site_data, site_folder, worker
from fedmll.deploy.site.memory_estimate import estimate_memory
from fedmll.deploy.site.server_access import ServerAccess, ServerAnswer
from fedmll.deploy.site.site_config import Site, SiteLimits, read_site_file, write_site_file
from fedmll.deploy.site.site_data import SiteDataSummary
from fedmll.deploy.site.worker import SiteWorker
from fedmll.methods import build_method
from fedmll.methods.framework.method import Method
from fedmll.methods.framework.task import task_of
from fedmll.testing import experiment


def modes(folder: Path) -> set[tuple[str, int]]:
    paths = [folder, *folder.rglob("*")]
    return {("folder" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode)) for path in paths}


# ---- 1. what stays on the disk


def test_site_files_are_private_and_prepared_images_are_deleted(consortium: Consortium, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        grid = make_grid(consortium, tmp_path)
        for node, keep in zip(grid.nodes, (False, True, False), strict=True):
            write_site_file(replace(read_site_file(node.site_file), keep_cache=keep), node.site_file)
        during: list[set[tuple[str, int]]] = []
        hear = RecordingCallback()
        hear.at_round = {1: lambda: during.append(modes(tmp_path / "site-a"))}
        drive(consortium, grid, tmp_path / "out", hear, method__name="test-drifting-slowly", training__rounds=2)
    finally:
        os.umask(old)
    assert during == [{("folder", 0o700), ("file", 0o600)}]
    assert not (tmp_path / "site-a" / "cache").exists()
    assert list((tmp_path / "site-b" / "cache").glob("*.npy"))  # on request
    assert not list(cache_folder().glob("*site*"))


def test_prepared_images_are_written_to_the_sites_cache_only(tmp_path: Path) -> None:
    def fill(array: np.ndarray) -> None:
        array[:] = 3

    with image_cache_in(tmp_path / "own"):
        assert image_folder() == tmp_path / "own"
        cached_array("key", lambda: ((2, 1, 2, 2), fill))
    assert image_folder() == cache_folder()
    assert (tmp_path / "own" / "key.npy").exists()
    assert not (cache_folder() / "key.npy").exists()


def test_join_deletes_prepared_images_also_when_it_fails(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(where: Site, access: ServerAccess, show: Any) -> None:
        (where.state_dir / "cache").mkdir()
        (where.state_dir / "cache" / "images.npy").write_bytes(b"x")
        raise FederationError("gone")

    monkeypatch.setattr(join, "_serve", fail)
    access, where = ServerAccess(server="localhost:1", ca=None, key=None), make_site_c(consortium, tmp_path)
    for keep in (False, True):
        with pytest.raises(FederationError, match="gone"):
            join.join(replace(where, keep_cache=keep), access, print)
        assert (where.state_dir / "cache").exists() is keep
    assert modes(where.state_dir) == {("folder", 0o700), ("file", 0o600)}


# ---- 2. limits and approval


@pytest.mark.parametrize(
    ("changes", "limits", "reason"),
    [
        ({"training__rounds": 1001}, {}, r"1001 rounds, and you allow 1000 \(--max-rounds\)"),
        ({"training__rounds": 3}, {"max_rounds": 2}, "--max-rounds"),
        ({"partition__holdout": 0.99}, {}, r"1 images would be left to train on .*--min-images"),
        ({}, {"min_images": 51}, r"50 images would be left .* at least 51"),
        ({}, {"methods": ("fedprox", "fedmlp")}, "method is 'fedavg', and you allow fedprox, fedmlp"),
        ({"model__channels": [4, 60_000]}, {"max_memory": 0.1}, r"would need .* GB of memory here.*--max-memory"),
        ({"model__channels": [60_000, 65_000]}, {}, r"more than 4 GB of memory"),
    ],
)
def test_limits_are_checked_before_any_image_is_read(
    consortium: Consortium, tmp_path: Path, changes: dict[str, Any], limits: dict[str, Any], reason: str
) -> None:
    where = make_site_c(consortium, tmp_path, limits=SiteLimits(**limits))
    with pytest.raises(SiteError, match=reason) as refused:
        SiteWorker(where, make_setup(consortium, **changes), lambda _: None)
    assert error_code(refused.value) == SiteErrorCode.LIMITS
    assert not (where.state_dir / "cache").exists()
    assert not (where.state_dir / "approved.json").exists()  # a person is not even asked


def test_very_large_images_are_rejected(consortium: Consortium, tmp_path: Path) -> None:
    setup = replace(make_setup(consortium), shape=(1, 20_000, 20_000))
    with pytest.raises(SiteError, match=r"16 images of 1 × 20000 × 20000 and the model would need more than 4 GB"):
        SiteWorker(make_site_c(consortium, tmp_path), setup, lambda _: None)


def test_memory_estimate_matches_the_network(consortium: Consortium) -> None:
    """Six times the model, and what grows with the batch."""
    experiment = experiment_for_sites.resolve_for_sites(consortium.server(model__channels=[4, 8]), (1, 8, 8))
    task = what_leaves.Task(experiment, tuple(CLASSES), (1, 8, 8), 3, torch.device("cpu"))
    small = estimate_memory(task, 50, 1e9)
    trainer = what_leaves.Trainer(task)
    assert small > 6 * 4 * len(trainer.weights.vector) + 2 * 16 * 64 * 4
    more = estimate_memory(task, 8, 1e9)  # a batch is no larger than the data
    fixed = 2 * more - small  # what does not grow with the batch: 8 and 16 images
    kept = sum(t.numel() * t.element_size() for t in (*trainer.model.parameters(), *trainer.model.buffers()))
    assert fixed == pytest.approx(6 * kept)


def test_error_in_the_memory_trial_is_passed_on(consortium: Consortium) -> None:
    experiment = experiment_for_sites.resolve_for_sites(
        consortium.server(method__name="fedlgt", method__encoder="glove:/no/such"), (1, 8, 8)
    )
    task = what_leaves.Task(experiment, tuple(CLASSES), (1, 8, 8), 3, torch.device("cpu"))
    with pytest.raises(ConfigError, match="There is no GloVe file"):
        estimate_memory(task, 50, 1e9)


def test_invalid_limits_are_rejected() -> None:
    for wrong in ({"max_rounds": 0}, {"min_images": 0}, {"max_memory": 0.0}):
        with pytest.raises(ConfigError, match="at least 1"):
            SiteLimits(**wrong)


def test_study_is_approved_once_and_again_when_it_changed(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for, said = [], list[str]()
    monkeypatch.setattr(worker, "confirm_at_terminal", lambda question: asked_for.append(len(said)) or True)
    where = make_site_c(consortium, tmp_path, needs_approval=True)
    SiteWorker(where, make_setup(consortium, partition__holdout=0.6, training__batch_size=4), said.append)
    text = "\n".join(said)
    assert "method           fedavg" in text
    assert "batch            4 (unusually small)" in text
    assert "20 to train on, 30 held out for tests (unusually many)" in text
    assert len(asked_for) == 1
    again = make_setup(consortium, partition__holdout=0.6, training__batch_size=4)
    SiteWorker(where, replace(again, run="run2"), said.append)  # another run of the same
    assert len(asked_for) == 1
    SiteWorker(where, make_setup(consortium, partition__holdout=0.6, training__batch_size=5), said.append)
    assert len(asked_for) == 2
    (where.state_dir / "approved.json").write_text("{broken")
    SiteWorker(where, again, said.append)
    assert len(asked_for) == 3
    assert (where.state_dir / "approved.json.damaged-1").read_text() == "{broken"
    assert any("renamed to approved.json.damaged-1" in line for line in said)


def test_without_approval_only_the_error_code_leaves(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("yes\n"))  # nobody sits there: a pipe cannot approve
    where, file = make_site_c(consortium, tmp_path, needs_approval=True), tmp_path / "site.json"
    write_site_file(where, file)
    reply = send_to_site(HELLO, {"setup": make_setup(consortium).to_json()}, file)
    message, about = from_records(reply.content)
    assert (message.tensors, message.numbers) == ({}, {})
    assert about == {"error": SiteErrorCode.APPROVAL, "name": SITE}
    assert "was not approved" in join_state.not_approved
    assert "--approve DIGEST" in (out := capsys.readouterr().out)
    assert make_setup(consortium).digest in out  # all of it
    assert not (where.state_dir / "cache").exists()


@pytest.mark.parametrize(("word", "taken"), [("y", True), ("Yes ", True), ("", False), ("no", False), ("j", False)])
def test_only_yes_confirms(monkeypatch: pytest.MonkeyPatch, word: str, taken: bool) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: word)
    assert confirm_at_terminal("Take part?") is taken


# ---- 3. paths, files and errors


@pytest.mark.parametrize(
    "setting",
    [
        {"model": {"weights": "/etc/passwd"}},
        {"model": {"weights": "labels.csv"}},  # beside where join was started
        {"model": {"weights": "run:/root/run"}},
        {"model": {"weights": "hub"}},
        {"method": {"name": "fedlgt", "encoder": "glove:/etc/passwd"}},
        {"method": {"name": "fedlgt", "encoder": "hub:somebody/anything"}},
        {"method": {"name": "fedlgt", "encoder": "file:secret.npz"}},
        {"method": {"name": "fedlgt", "fine_names": "secret.json"}},
        {"method": {"name": "compose", "parts": ["unknown-as-negative"], "text-query": {"encoder": "~/x"}}},
        {"partition": {"kind": "../../x"}},
        {"training": {"loss": "a\\b"}},
    ],
)
def test_path_from_the_server_is_rejected_and_not_opened(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    def never(values: Any) -> Experiment:
        raise AssertionError("the settings were used")

    monkeypatch.setattr(Experiment, "make", never)
    plain_setup = StudySetup(run="run1", experiment=setting, classes=tuple(CLASSES), shape=(1, 8, 8), clients=3)
    with pytest.raises(SiteError) as refused:
        SiteWorker(make_site_c(consortium, tmp_path), plain_setup, lambda _: None)
    assert error_code(refused.value) == SiteErrorCode.PATH


def test_names_and_sentences_are_not_taken_for_paths() -> None:
    told = {
        "model": {"weights": "resnet18-imagenet1k-v1", "channels": [4, 8]},
        "method": {"name": "fedlgt", "encoder": "wordllama", "states": "learned", "prompt": "PA/AP view of {class}"},
        "training": {"lr": 0.1},
    }
    assert file_references.resolve_files(told, ()) == told
    assert file_references.replace_files_by_digests(told) == told


def test_settings_that_a_site_does_not_need_are_not_checked() -> None:
    told = {"data": {"root": "/etc"}, "plugins": ["/x.py"], "engine": {"workers": 9}, "study": {}, "seed": 3}
    assert file_references.resolve_files(told, ()) == {"seed": 3}
    with pytest.raises(SiteError, match="not a table"):
        file_references.resolve_files([1], ())  # type: ignore[arg-type]


def test_files_are_replaced_by_their_digests(tmp_path: Path) -> None:
    weights, run, folder = tmp_path / "w.pth", tmp_path / "run", tmp_path / "encoder"
    weights.write_bytes(b"weights")
    for place in (run, folder):
        (place / "sub").mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"model" if place is run else b"encoder")
        (place / "sub" / "a.json").write_text("{}")
        (place / ".hidden").write_text(place.name)
    values = {
        "model": {"weights": str(weights)},
        "method": {"encoder": str(folder), "table": {"encoder": f"run:{run}"}},
    }
    told = file_references.replace_files_by_digests(values)
    assert str(tmp_path) not in json.dumps(told)
    # by sha256sum
    assert told["model"]["weights"] == "sha256:9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    assert (
        told["method"]["table"]["encoder"]
        == "run:sha256:9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4"
    )
    copies = [shutil.copytree(folder, tmp_path / "there" / "encoder"), shutil.copytree(run, tmp_path / "there" / "run")]
    (copies[0] / ".hidden").write_text("another")  # type: ignore[operator]
    own = [Path(shutil.copy(weights, tmp_path / "there" / "mine.pth")), *map(Path, copies)]
    assert file_references.resolve_files(told, own) == {
        "model": {"weights": str(own[0])},
        "method": {"encoder": str(own[1]), "table": {"encoder": f"run:{own[2]}"}},
    }
    (own[1] / "sub" / "a.json").write_text("{ }")
    with pytest.raises(SiteError, match=r"method\.encoder = sha256:.*--weights FILE") as refused:
        file_references.resolve_files(told, own)
    assert refused.value.code is SiteErrorCode.FILE
    with pytest.raises(ConfigError, match=r"model\.weights = '/no/file' is no file or folder on this machine"):
        file_references.replace_files_by_digests({"model": {"weights": "/no/file"}})


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("weights", lambda weights: weights[:1], "weights does not fit the model"),
        ("weights", lambda weights: weights.double(), "weights does not fit the model"),
        ("weights", lambda weights: weights * torch.nan, "weights has values that are not finite"),
        ("other/tensor", lambda weights: weights, "other/tensor belongs to no part of the method"),
        ("tensor", lambda weights: weights, "tensor belongs to no part of the method"),
    ],
)
def test_tensors_from_the_server_are_checked(
    consortium: Consortium, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], problem: str
) -> None:
    worker = SiteWorker(make_site_c(consortium, tmp_path), make_setup(consortium), lambda _: None)
    sent = worker.trainer.weights.dump()
    message = Message(sent | {name: change(sent["weights"])})
    with pytest.raises(SiteError, match=problem):
        worker.train(message, 1, None, None)
    with pytest.raises(SiteError, match=problem):
        worker.evaluate(message)
    assert worker.train(Message(sent), 1, None, None)[0]["weights"].shape == sent["weights"].shape


def test_only_listed_error_codes_leave_a_site() -> None:
    secret = "/home/jane-doe/scan.png"
    told = {type(e): error_code(e) for e in (
        DataError(secret), ConfigError(secret), ClientError(secret), ReplyRejected(secret), ValueError(secret),
        MemoryError(secret), FederationError(secret), SiteError(SiteErrorCode.STATE, secret),
    )}  # fmt: skip
    assert set(told.values()) <= set(SiteErrorCode)
    assert told[DataError] == SiteErrorCode.DATA
    assert told[ConfigError] == SiteErrorCode.SETTINGS
    assert told[ClientError] == SiteErrorCode.TRAINING
    assert told[ReplyRejected] == SiteErrorCode.MESSAGE
    assert told[ValueError] == told[MemoryError] == told[FederationError] == SiteErrorCode.INTERNAL
    assert told[SiteError] == SiteErrorCode.STATE


@pytest.mark.parametrize(
    "setup",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"run": "r", "experiment": {}, "classes": None, "shape": [1, 8], "clients": 3}),
        json.dumps({"run": "r", "experiment": {}, "classes": None, "shape": [1, True, 8], "clients": 3}),
        json.dumps({"run": "r", "experiment": {}, "classes": [1], "shape": [1, 8, 8], "clients": 3}),
        json.dumps({"run": "r", "experiment": {}, "classes": None, "shape": [1, 8, 8], "clients": "3"}),
        json.dumps({"run": "r", "experiment": [], "classes": None, "shape": [1, 8, 8], "clients": 3}),
    ],
)
def test_invalid_setup_is_rejected(consortium: Consortium, tmp_path: Path, setup: str) -> None:
    write_site_file(make_site_c(consortium, tmp_path), tmp_path / "site.json")
    about = from_records(send_to_site(HELLO, {"setup": setup}, tmp_path / "site.json").content)[1]
    assert about["error"] == SiteErrorCode.MESSAGE


# ---- 4. label sets


def test_client_receives_its_registered_classes_only(tmp_path: Path) -> None:
    (tmp_path / "a.labels").write_text("# as told by telephone\ncat\n dog \n\n")
    (tmp_path / "b.labels").write_text("cow\n")
    sets = client_keys.read_label_sets(tmp_path, ["a", "b"], ["cat", "cow", "dog"])
    assert sets == {"a": {"cat", "dog"}, "b": {"cow"}}
    client_keys.check_label_set(sets, "a", ["dog"])
    answers = set()
    for guess in (["cow"], ["unicorn"], ["cat", "cow"]):  # whether there is such a class or not
        with pytest.raises(ReplyRejected) as refused:
            client_keys.check_label_set(sets, "a", guess)
        answers.add(str(refused.value))
    assert len(answers) == 1
    with pytest.raises(ConfigError, match=r"which classes c may have: write c\.labels there"):
        client_keys.read_label_sets(tmp_path, ["a", "c"], ["cat", "cow", "dog"])
    with pytest.raises(ConfigError, match=r"b\.labels has the class 'cow', which this federation does not"):
        client_keys.read_label_sets(tmp_path, ["a", "b"], ["cat", "dog"])


def test_private_client_with_unregistered_classes_is_rejected_by_name(consortium: Consortium, tmp_path: Path) -> None:
    mine = Consortium(tmp_path / "copy")
    shutil.copytree(consortium.folder, mine.folder)
    (mine.keys / "site-b.labels").write_text("digit-1\n")
    hear = RecordingCallback()
    with pytest.raises(FederationError, match="site-b did not join"):
        drive(
            mine, make_grid(mine, tmp_path), tmp_path / "out", hear, method__name="private-fedavg",
            method__loss="sigmoid", join_timeout=0.5,
        )  # fmt: skip
    assert "site-b is rejected: its label set is not the one that is registered with its key" in hear.said


def test_client_without_classes_does_not_stop_the_start(consortium: Consortium, tmp_path: Path) -> None:
    """A private method does not begin with it; once written down it would end every resume too."""
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    lies = iter([[]])

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != HELLO:
            return reply
        message, about = from_records(reply.content)
        return FlowerMessage(to_records(message, about | {"classes": next(lies, about["classes"])}), reply_to=sent)

    grid.tamper = tamper
    drive(
        consortium, grid, tmp_path / "out", hear, method__name="private-fedavg", method__loss="sigmoid",
        training__rounds=1, join_timeout=30.0,
    )  # fmt: skip
    assert any(line.startswith("site-b is rejected: ") for line in hear.said)
    assert hear.rows[0]["clients"] == 3


def test_number_of_stored_memory_estimates_is_limited(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_ESTIMATES", 2)
    monkeypatch.setattr(worker, "_estimates", {})
    monkeypatch.setattr(worker, "estimate_memory", lambda *_: 1.0)
    for number in range(5):
        SiteWorker(
            make_site_c(consortium, tmp_path), replace(make_setup(consortium), run=f"run{number}"), lambda _: None
        )
        assert 1 <= len(worker._estimates) <= 2


# ---- 5. data


def test_data_digest_depends_on_every_image_and_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmll.data.fingerprint.LARGEST_READ", 8)  # as if the store were huge
    assert LARGEST_READ > 8
    store, told = np.zeros((9, 1, 2, 2), np.uint8), np.zeros((9, 2), np.int8)

    def digests(every: bool) -> str:
        return compute_digest({"training": site_data.Dataset(store.copy(), told.copy(), ("a", "b"))}, every_image=every)

    before, sampled = digests(True), digests(False)
    store[1, 0, 0, 0] = 1
    assert digests(False) == sampled  # not among the samples
    assert digests(True) != before
    store[1, 0, 0, 0], told[3, 1] = 0, -1
    assert digests(True) != before


def write_site(folder: Path, pixels: list[np.ndarray], cells: list[str]) -> Site:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")
    write_csv(folder / "labels.csv", [["image", "sick"], *([f"{n}.png", cell] for n, cell in enumerate(cells))])
    return Site(name="north", csv=folder / "labels.csv", images=folder, state_dir=folder / "memory")


def test_data_without_labels_or_with_blank_images_is_rejected(tmp_path: Path) -> None:
    picture = np.arange(64, dtype=np.uint8).reshape(8, 8)
    silent = write_site(tmp_path / "silent", [picture, picture], ["", ""])
    with pytest.raises(DataError, match="every cell of every class is blank"):
        site_data.check_site_data(silent)
    with pytest.raises(DataError, match="every cell of every class is blank"):
        site_data.load_site_data(silent, ["sick"], (1, 8, 8), 0, 0.0)
    black = write_site(tmp_path / "black", [0 * picture, 0 * picture + 255], ["1", "0"])
    with pytest.raises(DataError, match=r"Every image of .* is blank"):
        site_data.check_site_data(black)
    with pytest.raises(DataError, match=r"Every image of .* is blank"):
        site_data.load_site_data(black, ["sick"], (1, 8, 8), 0, 0.0)
    some = write_site(tmp_path / "some", [0 * picture, picture], ["1", ""])
    assert "1 images are blank: every pixel has the same value" in site_data.check_site_data(some).notes
    assert len(site_data.load_site_data(some, ["sick"], (1, 8, 8), 0, 0.0).train) == 2


def test_grey_images_saved_as_colour_are_grey(tmp_path: Path) -> None:
    pictures = [np.arange(k, k + 64, dtype=np.uint8).reshape(8, 8) for k in (0, 50)]
    grey = write_site(tmp_path / "grey", [np.stack([p, p, p], 2) for p in pictures], ["1", "0"])
    loaded = site_data.load_site_data(grey, ["sick"], (1, 8, 8), 0, 0.0).train
    assert loaded.samples(slice(0, 2)).tolist() == [[p.tolist()] for p in pictures]
    coloured = [np.stack([p, p, p], 2) for p in pictures]
    coloured[1][3, 3, 2] += 1
    with pytest.raises(DataError, match=r"shape \(3, 8, 8\).*needs \(1, 8, 8\)"):
        site_data.load_site_data(write_site(tmp_path / "colour", coloured, ["1", "0"]), ["sick"], (1, 8, 8), 0, 0.0)


# ---- 6. the memory folder, the terminal, messages


def test_two_joins_cannot_share_a_state_folder(tmp_path: Path) -> None:
    second = site_folder.lock_folder(tmp_path / "memory")
    named = rf"in use by another join \(process {os.getpid()} on "
    with site_folder.lock_folder(tmp_path / "memory"), pytest.raises(ConfigError, match=named):
        second.__enter__()
    with site_folder.lock_folder(tmp_path / "memory"):  # free again
        assert (tmp_path / "memory" / "join.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_damaged_client_state_is_explained_and_renamed(
    consortium: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    file = tmp_path / "site-a" / "run1" / "000000.000001.safetensors"
    hear.at_round = {1: lambda: file.write_bytes(b"garbage")}
    changes = {"method__name": "test-drifting-slowly", "training__rounds": 3, "min_clients": 2}
    drive(consortium, grid, tmp_path / "out", hear, **changes)
    refusals = [text for text in hear.said if "site-a is rejected" in text]
    assert len(refusals) == 2
    assert all(text.endswith(SiteErrorCode.STATE.description) for text in refusals)
    assert file.with_name(f"{file.name}.damaged-1").read_bytes() == b"garbage"
    shown = capsys.readouterr().out
    assert "It was renamed to 000000.000001.safetensors.damaged-1; nothing was deleted" in shown


@pytest.mark.parametrize("run", ["flower", "cache", "../x", "", "a/b", "x" * 65, 3])
def test_run_name_cannot_point_to_the_sites_own_files(consortium: Consortium, tmp_path: Path, run: Any) -> None:
    with pytest.raises(SiteError, match="not a valid folder name"):
        SiteWorker(make_site_c(consortium, tmp_path), replace(make_setup(consortium), run=run), lambda _: None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1bPpayload\x1b\\after", "after"),
        ("tab\tbell\x07back\x08\r\x9b2Jx", "tab bellback 2Jx"),
        ("two\nlines\u2028more", "two lines more"),
        ("right\u202eleft", "rightleft"),
        ("x" * 21, "xxxxxxxxxxxxxxxxxxxx …"),
        ("\x1b]never ended", ""),
        ("Größe ≥ 3", "Größe ≥ 3"),
    ],
)
def test_control_characters_from_the_server_are_removed(text: str, shown: str) -> None:
    assert printable(text, 20) == shown


def test_long_text_is_shortened_first() -> None:
    assert len(printable("y" * 10_000_000, 1000)) < 1100


def test_error_is_shown_without_escapes_and_only_once(
    consortium: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_site_file(make_site_c(consortium, tmp_path), tmp_path / "site.json")
    bad = replace(make_setup(consortium), run="\x1b[2Jx").to_json()
    for _ in range(3):
        send_to_site(HELLO, {"setup": bad}, tmp_path / "site.json")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("not a valid folder name") == 1


def test_brackets_in_column_names_are_shown_literally(tmp_path: Path) -> None:
    counts = np.array([1, 2, 3])
    summary = SiteDataSummary(
        images=6,
        held_out=None,
        classes=("[/]", "[bold red]x", "plain[1]"),
        present=counts,
        absent=counts,
        unknown=counts,
    )
    out = StringIO()
    Console(file=out, width=100).print(site_table("north", summary))
    assert all(name in out.getvalue() for name in ("[/]", "[bold red]x", "plain[1]"))


@pytest.mark.parametrize(
    "meta", [{"message_type": "query.unknown"}, {"message_type": "train.other"}, {"src_node_id": 9}, {"run_id": 8}]
)
def test_message_of_another_node_or_type_is_ignored_with_a_notice(
    consortium: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str], meta: dict[str, Any]
) -> None:
    write_site_file(make_site_c(consortium, tmp_path), tmp_path / "site.json")
    reply = send_to_site(BYE, {"setup": make_setup(consortium).to_json()}, tmp_path / "site.json", **meta)
    assert reply.has_error()
    assert not join_state.run_ended
    assert "ignored: a message " in capsys.readouterr().out


def test_only_the_end_message_of_its_own_run_ends_a_join(consortium: Consortium, tmp_path: Path) -> None:
    file, setup = tmp_path / "site.json", make_setup(consortium)
    write_site_file(make_site_c(consortium, tmp_path), file)
    send_to_site(HELLO, {"setup": setup.to_json()}, file)
    (tmp_path / "state" / "other").mkdir()
    kept = tmp_path / "state" / "other" / "000000.000001.safetensors"
    kept.write_bytes(b"x")
    forged = from_records(send_to_site(BYE, {"setup": replace(setup, run="other").to_json()}, file).content)[1]
    assert forged["error"] == SiteErrorCode.MESSAGE
    assert kept.exists()
    assert not join_state.run_ended
    assert "error" not in from_records(send_to_site(BYE, {"setup": setup.to_json()}, file).content)[1]
    assert join_state.run_ended


def method_of_two_rounds(refit: str = "none") -> Method:
    made = experiment(training__rounds=2, method__refit=refit)
    return build_method(task_of(build(made)))


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"round": "1"},
        {"round": True},
        {"round": -1},
        {"round": 4},
        {"round": 1, "state_round": "../../x"},
        {"round": 1, "state_round": 9},
        {"round": 1, "keep_rounds": "all"},
        {"round": 1, "keep_rounds": [None]},
    ],
)
def test_round_must_be_one_of_the_experiment(about: dict[str, Any]) -> None:
    with pytest.raises(SiteError, match="which round"):
        client_app._parse_rounds(about, method_of_two_rounds())


def test_valid_rounds_are_accepted() -> None:
    parse, method = client_app._parse_rounds, method_of_two_rounds()
    assert parse({"round": 3, "state_round": 2, "keep_rounds": [0, 1]}, method) == (3, 2, [0, 1])
    assert parse({"round": 0, "state_round": None, "keep_rounds": None}, method) == (0, None, None)
    refit = method_of_two_rounds(refit="logistic")
    last = max(refit.exchange_rounds("closing"))
    assert parse({"round": last}, refit)[0] == last > 3
    with pytest.raises(SiteError, match="which round"):
        parse({"round": last + 1}, refit)


# ---- join itself, with a SuperNode that is none


class FakeChild:
    def __init__(self, kind: str, node: Any) -> None:
        self.log = Path("log")

    def has_ended(self) -> bool:
        return False

    def stop(self) -> None:
        pass

    def read_log(self) -> str:
        return ""


def joined(monkeypatch: pytest.MonkeyPatch, turns: list[dict[str, Any]]) -> list[str]:
    """What join says while its executor goes through these turns; each sets how the join stands."""
    said: list[str] = []

    class FakeExecutor:
        def __init__(self, *_: Any) -> None:
            self.run_ended = self.has_answered = False

        def serve(self, alive: Any) -> None:
            turn = turns.pop(0)
            self.run_ended = self.has_answered = turn.pop("executor_ended")
            join_state.__dict__.update(turn)
            assert alive() is not bool(join_state.not_approved)

    monkeypatch.setattr(executor, "TaskExecutor", FakeExecutor)
    monkeypatch.setattr(child_processes, "ChildProcess", FakeChild)
    answer = ServerAnswer(certificate="", clock_offset=None)
    monkeypatch.setattr(join, "wait_for_server", lambda access, show: answer)
    monkeypatch.setattr(join, "RESTART_SECONDS", 0)
    monkeypatch.setattr(join, "FLUSH_SECONDS", 0)
    return said


def test_forged_end_message_does_not_end_a_join(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"executor_ended": True, "run_ended": False}, {"executor_ended": True, "run_ended": True}]
    said = joined(monkeypatch, turns)
    join.join(make_site_c(consortium, tmp_path), ServerAccess(server="localhost:1", ca=None, key=None), said.append)
    assert turns == []  # the first was not believed
    assert said[-2] == "the run is over"
    assert "audit.jsonl: the last hash is" in said[-1]


def test_join_that_nobody_approved_ends(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = joined(monkeypatch, [{"executor_ended": False, "not_approved": "The experiment was not approved."}])
    with pytest.raises(FederationError, match="was not approved"):
        join.join(make_site_c(consortium, tmp_path), ServerAccess(server="localhost:1", ca=None, key=None), said.append)


def write_certificate(folder: Path) -> str:
    certificates.create_server_certificate(folder, [])
    return (folder / "server.crt").read_text()


def test_renewed_certificate_of_the_server_is_used_and_another_one_on_the_way_is_reported(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server rejects requests that are signed for another certificate than its own."""
    turns = [{"executor_ended": False}, {"executor_ended": True, "run_ended": True}]
    said = joined(monkeypatch, turns)
    rejections = [f"[code: {FLOWER_ERROR_CODE}] {format_rejection(RejectionCode.SERVER)}", ""]
    monkeypatch.setattr(FakeChild, "read_log", lambda child: rejections.pop(0))
    old, new = (write_certificate(tmp_path / name) for name in ("old", "new"))
    seen = [old, new]
    monkeypatch.setattr(join, "wait_for_server", lambda *_: ServerAnswer(certificate=seen.pop(0), clock_offset=None))
    access = ServerAccess(server="localhost:1", ca=None, key=None)
    join.join(make_site_c(consortium, tmp_path), access, said.append)
    assert turns == []
    turns += [{"executor_ended": False, "run_ended": False}]
    rejections[:] = [f"[code: {FLOWER_ERROR_CODE}] {format_rejection(RejectionCode.SERVER)}"]
    seen += [old, old]
    with pytest.raises(FederationError, match="ends the TLS connection, for example a reverse proxy"):
        join.join(make_site_c(consortium, tmp_path), access, said.append)


def test_join_names_a_missing_file(consortium: Consortium, tmp_path: Path) -> None:
    where = make_site_c(consortium, tmp_path, local_files=(tmp_path / "gone.pth",))
    with pytest.raises(ConfigError, match=r"gone\.pth does not exist \(--weights\)"):
        join.join(where, ServerAccess(server="localhost:1", ca=None, key=None), print)


def test_site_file_is_read_as_it_was_written(consortium: Consortium, tmp_path: Path) -> None:
    limits = SiteLimits(max_rounds=7, min_images=3, max_memory=0.5, methods=("fedavg",))
    where = make_site_c(
        consortium, tmp_path, local_files=(tmp_path / "a",), limits=limits, needs_approval=True, keep_cache=True
    )
    where = replace(where, approved_digest="0" * 64)
    write_site_file(where, tmp_path / "site.json")
    assert read_site_file(tmp_path / "site.json") == where


def test_join_command_of_a_rehearsal(tmp_path: Path) -> None:
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"x")
    plan = rehearsal.Rehearsal(
        names=("client-1",),
        experiment=Experiment.make({"model": {"weights": str(weights)}}),
        folder=tmp_path,
        digest="d" * 64,
    )
    command = rehearsal.join_command(plan, "client-1", "localhost:1", insecure=True)
    assert command[command.index("--approve") + 1] == "d" * 64
    assert command[command.index("--weights") + 1] == str(weights)


# ---- 8. what leaves


HOW = (
    "run `python tests/deploy/what_leaves.py --write` and look at what changed in docs/reference/what-leaves-a-site.md"
)


@pytest.fixture(scope="module")
def table() -> list[what_leaves.Row]:
    return documented(DOCUMENT.read_text())


@pytest.mark.parametrize("name", what_leaves.methods())
def test_what_leaves_a_site_is_what_the_document_says(
    consortium: Consortium, tmp_path: Path, table: list[what_leaves.Row], name: str
) -> None:
    recorded = sorted(rows_of(consortium, tmp_path, name))
    written = sorted(row for row in table if row[0] in (name, what_leaves.EVERY))
    assert {row[0] for row in table} >= {name}, (
        f"docs/reference/what-leaves-a-site.md does not say what leaves with '{name}': {HOW}"
    )
    assert recorded == written, (
        f"what leaves with '{name}' is not what docs/reference/what-leaves-a-site.md says: {HOW}"
    )


def test_document_lists_no_other_method(table: list[what_leaves.Row]) -> None:
    assert {row[0] for row in table} == {*what_leaves.methods(), what_leaves.EVERY}


def test_no_reply_describes_a_single_image(table: list[what_leaves.Row]) -> None:
    assert not [row for row in table if "N" in row[2].replace("(", " ").replace(")", " ").replace(",", " ").split()]
