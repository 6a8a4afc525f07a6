"""A real federation of sites whose data has other names: COCO- and VOC-shaped folders, each mapped by its own site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from consortium import Consortium
from real_federation import World
from site_folders import CLASSES, RENAME, SIDE, federation_of_both, write_coco, write_voc

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.data.sources import write_labels
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.server.rehearsal import prepare_rehearsal
from fedmll.deploy.server.serve import study_digest


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    write_coco(tmp_path / "coco")
    write_voc(tmp_path / "voc")
    certificates.create_server_certificate(tmp_path / "keys", [])
    for site, data in (("coco", "coco:2014"), ("voc", "voc:2007")):
        client_keys.create_client_key(tmp_path / "keys", site)
        write_labels(data, tmp_path / site, tmp_path / f"{site}.csv")
    (tmp_path / "names.csv").write_text("own,study\n" + "".join(f"{own},{name}\n" for own, name in RENAME.items()))
    made = World(Consortium(tmp_path), tmp_path)
    yield made
    made.close()


def options(world: World, site: str, *more: str | Path) -> list[str | Path]:
    home = world.folder
    return [
        "--name", site, "--csv", home / f"{site}.csv", "--images", home / site, "--state-dir", home / f"state-{site}",
        "--ca", home / "keys" / "ca.crt", "--key", home / "keys" / f"{site}.key", "--patience", "100", "--approve",
        world.digest, "--min-count", "1", "--no-report", *more,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_sites_with_different_label_sets_train_one_model(world: World) -> None:
    file = world.folder / "study.toml"
    experiment = Experiment.make(
        {
            "data": {"name": "none", "size": SIDE},
            "study": {"classes": CLASSES},
            "method": {"name": "fedavg-pl"},
            "model": {"channels": [4, 8]},
            "training": {"rounds": 2, "batch_size": 8},
        }
    )
    file.write_text(experiment.to_toml())
    world.digest = study_digest(experiment, 2)
    server = world.start(
        "server", "server", file, "--clients", "coco,voc", "--listen", f"127.0.0.1:{world.port}", "--keys",
        world.folder / "keys", "--out", world.out, "--join-timeout", "120",
    )  # fmt: skip
    # a site finds its own mistake before it talks to the server: VOC's names are not those of the study
    wrong = world.folder / "wrong.csv"
    wrong.write_text("own,study\nsoffa,couch\n")
    mistaken = world.start("mistaken", "join", f"localhost:{world.port}", *options(world, "voc", "--rename", wrong))
    assert world.ended(mistaken) == 2
    assert "--rename names the class 'soffa'" in world.said("mistaken") and "did you mean 'sofa'" in world.said(
        "mistaken"
    )
    own = "dog,cat,sofa,aeroplane"
    names = ["--rename", world.folder / "names.csv", "--classes", own]
    sites = [
        world.start("coco", "join", f"localhost:{world.port}", *options(world, "coco")),
        world.start("voc", "join", f"localhost:{world.port}", *options(world, "voc", *names)),
    ]
    for process in (server, *sites):
        assert world.ended(process) == 0, world.said("server") + world.said("coco") + world.said("voc")
    stated = json.loads((world.out / "sites.json").read_text())
    text = json.dumps(stated)
    assert "airplane" in text and "zebra" in text
    assert "aeroplane" not in text and "sofa" not in text  # the server never learns a site's own names
    summary = json.loads((world.out / "summary.json").read_text())
    assert summary["classes"] == CLASSES
    assert summary["annotating_clients"] == {"dog": 2, "cat": 2, "couch": 2, "zebra": 1, "airplane": 1}
    for site in ("coco", "voc"):
        assert (world.folder / f"state-{site}" / "model.safetensors").is_file()


def test_a_rehearsal_gives_each_client_the_data_of_its_site(tmp_path: Path) -> None:
    experiment = Experiment.make(federation_of_both(tmp_path))
    with pytest.raises(ConfigError, match=r"have 2 clients \(coco, voc\); use --simulate 2"):
        prepare_rehearsal(experiment, 3, tmp_path / "three")
    rehearsal = prepare_rehearsal(experiment, 2, tmp_path / "two")
    assert rehearsal.experiment.sites is None
    labels = (rehearsal.folder / "keys" / "client-2.labels").read_text().split()
    assert labels == ["dog", "cat", "couch", "airplane"]
