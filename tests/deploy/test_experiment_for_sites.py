"""What a server and its sites agree on: rules decided once, frozen tensors alike, nothing of the server's own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium
from fake_grid import (  # noqa: F401  (fixtures)
    FakeGrid,
    FakeNode,
    RecordingCallback,
    close,
    consortium,
    drive,
    fast_polling,
    make_grid,
    make_site,
)  # fmt: skip
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file, save_file

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.message import Message
from fedmll.deploy.experiment_for_sites import settings_for_sites
from fedmll.deploy.flower.client_app import EVALUATE, HELLO
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.server import serve
from fedmll.deploy.site.site_config import write_site_file


def test_sites_receive_the_resolved_settings() -> None:
    cifar = Experiment.make({"data": {"name": "ml-cifar10"}, "method": {"name": "fednca-ml"}})
    told = settings_for_sites(cifar)
    assert told["data"] == {"name": "none"}
    assert told["method"]["lambda_neg"] == 1.0
    assert Experiment.make(told).method.options["lambda_neg"] == 1.0
    assert settings_for_sites(Experiment.make({"method": {"name": "fedmlp"}}))["method"]["first_stage"] == 2


def test_settings_of_the_server_are_not_sent(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    unlabelled = tmp_path / "unlabelled"
    unlabelled.mkdir()
    for place in range(40):
        shutil.copy(consortium.folder / "images" / f"{place:05d}.png", unlabelled)
    changes = {"method__name": "private-fedavg", "method__loss": "sigmoid", "method__tuning": "mse",
               "method__tuning_images": str(unlabelled)}  # fmt: skip
    grid = make_grid(consortium, tmp_path)
    there = drive(consortium, grid, tmp_path / "out", **changes)
    assert close(there, run(consortium.local(**changes)))
    assert not close(there, run(consortium.local(method__name="private-fedavg", method__loss="sigmoid")))
    for message in grid.sent:
        info = json.dumps(from_records(message.content)[1])
        assert "tuning" not in info
        assert "unlabelled" not in info


def glove(path: Path, seed: int) -> None:
    words = sorted({*["the", "photo", "contains", "positive", "negative", "digit"], *(str(n) for n in range(10))})
    vectors = [[((hash_of(word, place, seed)) % 997) / 997 - 0.5 for place in range(6)] for word in words]
    path.write_text("".join(f"{w} {' '.join(map(str, v))}\n" for w, v in zip(words, vectors, strict=True)))


def hash_of(word: str, place: int, seed: int) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(word)) * (place + 7) * (seed + 3) + place * 131


def with_file(consortium: Consortium, folder: Path, file: Path, others: dict[str, Path]) -> FakeGrid:  # noqa: F811
    """Every site has a copy of the file; those of `others` another one."""
    grid = make_grid(consortium, folder)
    for node in grid.nodes:
        here = replace(make_site(consortium, node.name, folder), local_files=(others.get(node.name, file),))
        write_site_file(here, node.site_file)
    return grid


def test_site_with_another_text_encoder_is_rejected(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    file, other = tmp_path / "vectors.txt", tmp_path / "other.txt"
    glove(file, 0)
    glove(other, 1)
    grid, hear = with_file(consortium, tmp_path, file, {"site-b": other}), RecordingCallback()
    with pytest.raises(FederationError, match="site-b did not join"):
        drive(
            consortium, grid, tmp_path / "out", hear, method__name="fedlgt", method__encoder=f"glove:{file}",
            training__rounds=1, join_timeout=1.0,
        )  # fmt: skip
    refusals = [text for text in hear.said if "rejected" in text]
    assert refusals
    assert all(text.startswith("site-b is rejected: it lacks a file that the experiment") for text in refusals)
    for message in grid.sent:
        assert str(tmp_path) not in json.dumps(from_records(message.content)[1])


def test_site_with_another_tokenizer_is_rejected(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """The same file, and other vectors: another version of a library, or a site that lies."""
    file = tmp_path / "vectors.txt"
    glove(file, 0)
    grid, hear = with_file(consortium, tmp_path, file, {}), RecordingCallback()

    def lie(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != HELLO:
            return reply
        _, info = from_records(reply.content)
        info["frozen"] = {name: [2 * number for number in numbers] for name, numbers in info["frozen"].items()}
        return FlowerMessage(to_records(Message(), info), reply_to=sent)

    grid.tamper = lie
    with pytest.raises(FederationError, match="site-b did not join"):
        drive(
            consortium, grid, tmp_path / "out", hear, method__name="fedlgt", method__encoder=f"glove:{file}",
            training__rounds=1, join_timeout=1.0,
        )  # fmt: skip
    refusals = [text for text in hear.said if "rejected" in text]
    assert all(text.startswith("site-b is rejected: the frozen part of its model differs from") for text in refusals)
    assert "labels" in refusals[0]


def test_site_with_another_frozen_backbone_is_refused_and_its_weights_never_travel(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A site has a copy of the run that the experiment starts from, and it is that one by its digest."""
    earlier, other = tmp_path / "earlier", tmp_path / "other"
    run(consortium.local(training__rounds=1), earlier)
    shutil.copytree(earlier, other)
    good = load_file(earlier / "model.safetensors")
    changed = {name: t + 0.01 if name == "backbone.blocks.1.0.weight" else t for name, t in good.items()}
    save_file(changed, other / "model.safetensors")
    frozen = {"model__weights": f"run:{earlier}", "model__freeze": "backbone", "training__rounds": 1}
    grid, hear = with_file(consortium, tmp_path, earlier, {"site-b": other}), RecordingCallback()
    with pytest.raises(FederationError, match="site-b did not join"):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=1.0, **frozen)
    refusals = [text for text in hear.said if "rejected" in text]
    assert refusals and all(text.startswith("site-b is rejected: it lacks a file") for text in refusals)
    grid = with_file(consortium, tmp_path, earlier, {})
    drive(consortium, grid, tmp_path / "out2", RecordingCallback(), **frozen)
    sent = [from_records(message.content)[0].tensors for message in grid.sent]
    travelled = {len(tensors["weights"]) for tensors in sent if "weights" in tensors}
    assert travelled == {10 * (8 + 1) + 2 * 8}  # the head, and mean and scale of the features


def test_sites_with_the_same_encoder_are_accepted(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    file, hear = tmp_path / "vectors.txt", RecordingCallback()
    glove(file, 0)
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(file, tmp_path / "copy" / "under-another-name.txt")
    drive(
        consortium, with_file(consortium, tmp_path, Path(copy), {}), tmp_path / "out", hear, method__name="fedlgt",
        method__encoder=f"glove:{file}", training__rounds=1,
    )  # fmt: skip
    assert not [text for text in hear.said if "rejected" in text]


def test_site_with_changed_labels_is_rejected(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    mine = Consortium(tmp_path / "copy")
    shutil.copytree(consortium.folder, mine.folder)
    grid = make_grid(mine, tmp_path)
    drive(mine, grid, tmp_path / "out", training__rounds=1)
    (tmp_path / "out" / "summary.json").unlink()
    csv = mine.folder / "site-b" / "labels.csv"
    lines = csv.read_text().splitlines()
    lines[1] = lines[1].replace(",1", ",x").replace(",0", ",1", 1).replace(",x", ",0")  # as many positives as before
    csv.write_text("\n".join(lines) + "\n")
    hear = RecordingCallback()
    with pytest.raises(FederationError):
        drive(mine, make_grid(mine, tmp_path), tmp_path / "out", hear, training__rounds=1, join_timeout=1.0)
    assert any(
        "site-b is rejected: its data changed" in text and "the labels or images differ" in text for text in hear.said
    )


def test_final_model_needs_no_second_exchange(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", training__rounds=2, partition__holdout=0.2)
    assert [kind for kind, _ in grid.log].count(EVALUATE) == 2 * len(NAMES)


def test_server_that_cannot_start_leaves_no_folder(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    import socket

    server = serve.ServerSettings(clients=NAMES, host="127.0.0.1", port=1, keys=str(consortium.keys))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = serve.replace(server, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="Cannot listen"):
            serve.serve(consortium.server(), busy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
