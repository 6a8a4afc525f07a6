"""Plug-ins: an installed package (by pip, with entry points) and a file (--plugin) bring methods, data and backbones
that run, compare and resume like the built-in ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.runs.run_folder import RunFolder

CODE = """
import numpy as np
from torch import nn

from fedmll import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.sources.base import Source
from fedmll.methods.fedavg import FedAvg
from fedmll.models.backbones import Backbone


class FedMine(FedAvg):
    name = "NAME"
    summary = "FedAvg under another name"


def load(request):
    images = np.random.default_rng(0).integers(0, 256, (120, 1, 8, 8), dtype=np.uint8)
    labels = (images.mean((2, 3)) > [[127, 128, 126]]).astype(np.int8)
    data = Dataset(images, labels, ("a", "b", "c"))
    return Splits(data.subset(np.arange(90)), data.subset(np.arange(90, 120)))


register("source", "NAME-data")(Source(description="noise", load=load, available=lambda root: True))


@register("backbone", "NAME-net")
class Net(Backbone):
    def __init__(self, model, sample_shape):
        super().__init__()
        self.width = 4
        self.conv = nn.Conv2d(sample_shape[0], 4, 3, 2)

    def forward(self, images):
        return self.conv(images).relu()


@register("loss", "NAME-loss")
def squared(logits, targets, positive_weight):
    return (logits.sigmoid() - targets) ** 2


@register("partition", "NAME-halves")
def halves(request):
    from fedmll.data.partition import Partition

    rows = tuple(np.array_split(np.arange(len(request.labels)), request.clients))
    names = tuple(f"half{i}" for i in range(request.clients))
    allowed = np.ones((request.clients, request.labels.shape[1]), bool)
    return Partition(clients=rows, names=names, allowed=allowed, labels=request.labels, report={})


@register("annotation", "NAME-all")
def everything(clients, classes, seed, missing):
    return np.ones((clients, classes), bool)


@register("augmentation", "NAME-dim")
def dim(images, generator):
    return images * 0.5


@register("metric", "NAME-score")
def score(scores, targets):
    return 42.0, np.full(scores.shape[1], 42.0)
"""
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "fedmll-mine"
version = "1.5"
[project.entry-points."fedmll.plugins"]
mine = "fedmll_mine"
[tool.setuptools]
py-modules = ["fedmll_mine"]
"""
SOURCE = Path(__file__).parents[2] / "src"


def uses(name: str) -> list[str]:
    chosen = {
        "training.loss": "loss", "partition.kind": "halves", "annotation.kind": "all", "training.augment": "dim",
    }  # fmt: skip
    words = ["--data", f"{name}-data", "--backbone", f"{name}-net", "--rounds", "2", "--clients", "2", "--workers", "2"]
    return words + [word for key, last in chosen.items() for word in ("--set", f"{key}={name}-{last}")]


def fedmll(here: Path, *words: str, packages: Path | None = None, code: int = 0) -> str:
    path = os.pathsep.join(map(str, filter(None, [SOURCE, packages])))
    said = subprocess.run(
        [sys.executable, "-m", "fedmll", *words],
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert said.returncode == code, said.stdout + said.stderr
    return said.stdout + said.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip installed a package that knows fedmll and is not known to it."""
    project, target = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("site-packages")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "fedmll_mine.py").write_text(CODE.replace("NAME", "fedmine"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(project)], check=True, capture_output=True)
    return target


def test_plugins_of_an_installed_package_run_compare_and_resume(packages: Path, tmp_path: Path) -> None:
    listed = fedmll(tmp_path, "methods", packages=packages)
    assert "fedmine" in listed and "fedprox" in listed
    assert "fedmine-data" in fedmll(tmp_path, "data", "list", packages=packages)
    words = ["--method", "fedmine", *uses("fedmine"), "--out", "one"]
    said = fedmll(tmp_path, "run", *words, packages=packages)
    assert "fedmine on fedmine-data, round 2" in said
    assert "42.00" in said
    assert json.loads((tmp_path / "one" / "plugins.json").read_text())["packages"] == {"fedmll-mine": "1.5"}
    assert "fedmine-score" in (tmp_path / "one" / "per_class.csv").read_text()
    fedmll(tmp_path, "resume", "one", "--rounds", "3", packages=packages)
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["rounds"] == 3
    said = fedmll(
        tmp_path, "compare", "--methods", "fedavg,fedmine", "--seeds", "0", *uses("fedmine"), "--out", "grid",
        "--metrics", "macro_auc,fedmine-score", packages=packages,
    )  # fmt: skip
    assert said.count("42.00") == 2
    gone = fedmll(tmp_path, "resume", "one", code=2)
    assert "no method 'fedmine'" in gone and "pip install fedmll-mine==1.5" in gone


def test_plugin_file_runs_compares_and_resumes_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE.replace("NAME", "filed"))
    plugin = ["--plugin", "mine.py"]
    assert "filed" in fedmll(tmp_path, "methods", *plugin)
    assert "filed-data" in fedmll(tmp_path, "data", "list", *plugin)
    assert "half1" in fedmll(tmp_path, "data", "describe", *plugin, *uses("filed")[:2], "--clients", "2",
                             "--set", "partition.kind=filed-halves")  # fmt: skip
    fedmll(tmp_path, "run", *plugin, "--method", "filed", *uses("filed"), "--out", "one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fedmll(elsewhere, "resume", "../one", "--rounds", "3")
    fedmll(tmp_path, "compare", *plugin, "--methods", "filed", "--seeds", "0", *uses("filed"), "--out", "grid")
    fedmll(elsewhere, "compare", "--plugin", "../mine.py", "--methods", "filed", "--seeds", "0,1", *uses("filed"),
           "--out", "../grid")  # fmt: skip
    (tmp_path / "mine.py").unlink()
    gone = fedmll(tmp_path, "resume", "one", code=2)
    assert f"{tmp_path / 'mine.py'} does not exist" in gone


def experiment_with(file: Path, **values: object) -> Experiment:
    return Experiment.make({"plugins": [str(file)], **values})


def test_fingerprint_does_not_depend_on_the_path_of_a_plugin_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("")
    one, two = experiment_with(Path("one.py")), experiment_with(Path("two.py"))
    assert one.plugins == (str(tmp_path / "one.py"),)
    assert one.fingerprint() == two.fingerprint() == Experiment().fingerprint()
    assert one.differs(two) == []
    assert one.changed({"seed": 4}).plugins == one.plugins
    assert Experiment.make({"plugins": one.plugins}).to_toml() == one.to_toml()


def test_run_stores_its_plugins_and_warns_about_changes(tmp_path: Path) -> None:
    file, out = tmp_path / "remembered.py", tmp_path / "run"
    file.write_text("x = 1\n")
    experiment = experiment_with(file)
    RunFolder(out).create(experiment)
    assert RunFolder(out).check_plugins(RunFolder(out).load_experiment()) == []
    file.write_text("x = 2\n")
    (warning,) = RunFolder(out).check_plugins(RunFolder(out).load_experiment())
    assert f"{file} has changed since the run began" in warning
    (warning,) = RunFolder(out).check_plugins(Experiment())
    assert "no longer used" in warning
    saved = json.loads((out / "plugins.json").read_text())
    (out / "plugins.json").write_text(json.dumps(saved | {"files": {}, "packages": {"nobody-has-this": "1.0"}}))
    (warning,) = RunFolder(out).check_plugins(experiment)
    assert "nobody-has-this is no longer installed; the run began with 1.0" in warning
    RunFolder(tmp_path / "plain").create(Experiment())
    assert not (tmp_path / "plain" / "plugins.json").exists()
    assert RunFolder(tmp_path / "plain").check_plugins(experiment) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_this_name", "cannot be imported .ModuleNotFoundError: No module named"),
        ("x = (", "cannot be imported .SyntaxError"),
        ("from fedmll import register\n@register('loss', 'bce')\ndef bce(*_): ...", "name of a built-in loss"),
        ("from fedmll.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    name = 'fedprox'", "built-in method"),
        ("from fedmll import register\nregister('losss', 'x')", "did you mean 'loss'"),
    ],
)
def test_error_names_a_plugin_file_that_cannot_be_imported(code: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(code)
    registry.all_of("loss"), registry.all_of("method")
    with pytest.raises(ConfigError, match=message) as error:
        experiment_with(file)
    assert str(file) in str(error.value)


def test_changed_plugin_file_is_imported_again(tmp_path: Path) -> None:
    file = tmp_path / "again.py"
    for value in (1.0, 2.0, 2.0):
        file.write_text(
            f"from fedmll import register\n@register('loss', 'again')\ndef f(logits, *_): return {value} * logits"
        )
        experiment_with(file, training={"loss": "again"})
        assert registry.find("loss", "again")(1.0) == value


def test_error_names_an_installed_package_that_cannot_be_imported(packages: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    info = broken / "broken-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[fedmll.plugins]\nworse = broken_module\n")
    said = fedmll(tmp_path, "data", "list", packages=broken, code=2)
    assert "'worse' of the installed package broken cannot be imported" in said
    assert "pip uninstall broken" in said
