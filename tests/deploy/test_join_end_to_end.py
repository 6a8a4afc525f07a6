"""A real federation with TLS and keys, and what its members have in the end: two clients and one who only validates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from consortium import Consortium, write_consortium
from real_federation import World, children_left  # noqa: F401

from fedmll.deploy.server.serve import study_digest
from fedmll.inference.model_file import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> Iterator[World]:
    made = World(consortium, tmp_path)
    yield made
    made.close()


def test_all_sites_get_the_model_and_a_report(world: World, consortium: Consortium) -> None:
    file = world.folder / "study.toml"
    experiment = consortium.server(training__rounds=2, partition__holdout=0.3)
    file.write_text(experiment.to_toml())
    world.digest = study_digest(experiment, 2)
    server = world.start(
        "server", "server", file, "--clients", "site-a,site-b", "--validators", "site-c", "--listen",
        f"127.0.0.1:{world.port}", "--keys", consortium.keys, "--out", world.out, "--join-timeout", "120",
    )  # fmt: skip
    got = world.folder / "got"
    clients = [world.join("site-a"), world.join("site-b", None, None, "--out", str(got), "--no-report")]
    home = consortium.folder
    validator = world.start(
        "site-c", "validate", f"localhost:{world.port}", "--name", "site-c", "--csv", home / "site-c" / "labels.csv",
        "--images", home / "images", "--state-dir", world.folder / "memory-site-c", "--patience", "100",
        "--approve", world.digest, "--ca", consortium.keys / "ca.crt", "--key", consortium.keys / "site-c.key",
    )  # fmt: skip
    for process in (server, *clients, validator):
        assert world.ended(process) == 0, world.said("server") + world.said("site-c")
    servers = load_model(world.out / "model.safetensors")
    for place in ("memory-site-a", "got", "memory-site-c"):
        mine = load_model(world.folder / place / "model.safetensors")
        assert all(bool((mine.weights[name] == tensor).all()) for name, tensor in servers.weights.items()), place
    assert (
        "Your test data is too small for a comparison"
        in (world.folder / "memory-site-a" / "site-report.html").read_text()
    )
    assert not (got / "site-report.html").exists()
    assert not (world.folder / "memory-site-a" / "cache").exists()
    assert (world.folder / "memory-site-c" / "site-report.html").exists()
    assert "round 1: loss" in world.said("site-a")
    assert "round 1: loss" not in world.said("site-c")
    assert (world.out / "per_client.csv").read_text().splitlines()[-1].startswith("site-c,50,")
    assert "did not receive the model" not in world.said("server")
