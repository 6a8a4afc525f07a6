"""Full and read-only disks: every command says so in one sentence, exits with 1 and leaves nothing half-written."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small
from PIL import Image

from fedmll import resume, run
from fedmll.core.files import is_leftover

SMALL = ("--clients", "3", "--set", "data.limit=200", "--workers", "0")
READS_A_RUN = {  # RUN stands for the folder of a run, DISK for the disk
    "resume": ("RUN", "--rounds", "3", "--workers", "0"),
    "tune": ("RUN",),
    "report": ("RUN", "--out", "DISK/page.html", "--files"),
    "plot": ("RUN", "--out", "DISK/curve.png"),
    "errors": ("RUN", "--out", "DISK/errors.png"),
    "export": ("RUN", "--to", "onnx", "--out", "DISK/exported"),
    "predict": ("RUN", "images", "--out", "DISK/predictions.csv"),
}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk in memory; skips the test where that is not allowed."""
    disk = tmp_path / "disk"

    def mount_with(options: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a disk in memory cannot be mounted here")
        return disk

    yield mount_with
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # files may still be mapped


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(training__rounds=2, partition__clients=3, data__limit=200), out)
    return out


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(b"0" * 4096):
                pass
        except OSError:
            pass


def assert_one_sentence(said: Any, *expected: str) -> None:
    assert said.code == 1 and said.error.startswith("error: ") and said.error.count("\n") == 1, said
    assert "Traceback" not in said.error and all(text in said.error for text in expected), said


def leftovers(disk: Path) -> list[Path]:
    return [path for path in disk.rglob("*") if is_leftover(path)]


@pytest.mark.parametrize("size", ["size=4k", "size=40k", "size=400k", "nr_inodes=3", "nr_inodes=6"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_run_on_a_full_disk_can_be_continued_or_repeated(
    fedmll: Any, mount: Callable[[str], Path], size: str, workers: str
) -> None:
    disk = mount(size)
    options = ("--rounds", "2", *SMALL, "--workers", workers, "--method", "scaffold", "--set", "training.optimizer=sgd")
    assert_one_sentence(fedmll("run", "--out", disk / "run", *options), "the disk is full, or has no free inodes")
    assert not leftovers(disk)
    subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=1000", str(disk)], check=True)
    begun = (disk / "run" / "experiment.toml").exists()
    words = ("resume", disk / "run") if begun else ("run", "--out", disk / "run", *options)
    assert fedmll(*words).code == 0
    rows = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


@pytest.mark.parametrize("command", READS_A_RUN)
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_commands_on_a_full_or_read_only_disk(
    fedmll: Any, mount: Callable[[str], Path], finished: Path, tmp_path: Path, command: str, kind: str
) -> None:
    disk = mount("size=20m")
    folder = Path(shutil.copytree(finished, disk / "run"))
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "images" / "a.png")
    if kind == "full":
        fill(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    words = [word.replace("RUN", str(folder)).replace("DISK", str(disk)) for word in READS_A_RUN[command]]
    said = fedmll(command, *words)
    assert_one_sentence(said, "the disk is full" if kind == "full" else "Read-only file system", str(disk))
    after = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    assert not leftovers(disk)
    if command != "resume" or kind == "read-only":
        assert after == before
        return
    (disk / "fill").unlink()
    whole = run(small(training__rounds=3, partition__clients=3, data__limit=200)).weights
    assert all(torch.equal(weight, whole[name]) for name, weight in resume(folder).weights.items())


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("size", ["size=4k", "size=200k", "nr_inodes=3", "nr_inodes=30"])
def test_compare_on_a_full_disk_can_be_continued(
    fedmll: Any, mount: Callable[[str], Path], size: str, jobs: str
) -> None:
    disk = mount(size)
    words = ("compare", "--out", disk / "comparison", "--methods", "fedavg,fedprox", "--seeds", "0", "--rounds", "1")
    said = fedmll(*words, *SMALL, "--jobs", jobs)
    assert_one_sentence(said, "the disk is full, or has no free inodes")
    assert not leftovers(disk)
    subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=1000", str(disk)], check=True)
    assert fedmll(*words, *SMALL, "--jobs", jobs).code == 0
    assert "not all runs are done" not in (disk / "comparison" / "table.md").read_text()


def test_compare_on_a_read_only_disk(fedmll: Any, mount: Callable[[str], Path]) -> None:
    disk = mount("size=20m")
    words = ("compare", "--out", disk / "comparison", "--methods", "fedavg", "--seeds", "0", "--rounds", "1", *SMALL)
    assert fedmll(*words).code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert_one_sentence(fedmll(*words), "Read-only file system", str(disk / "comparison"))
    said = fedmll("show", disk / "comparison")
    assert said.code == 0 and "1 of 1 started runs are finished" in said.out
