"""A model file is data, also one that was made to attack: the commands that take one import nothing and open nothing
that it names, and they say in one sentence why they refuse it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from conftest import small
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedmll import load_model, load_run, run
from fedmll.cli.main import app
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.inference import model_metadata
from fedmll.inference.model_file import AllocationLimit, write_model
from fedmll.inference.model_metadata import PluginWarning
from fedmll.models.pretrained_weights import METADATA_KEY
from fedmll.runs.run_folder import MODEL_FILE

CODE = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"
PLUGIN = """
from fedmll import Method

class Own(Method):
    name = "own-method"
"""
COMMANDS = ("predict", "validate", "export", "copy")
Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(training__rounds=1), folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    lines = [",".join(("image", *names))]
    for place in range(4):
        Image.fromarray(generator.integers(0, 256, (16, 16), dtype=np.uint8)).save(folder / f"{place}.png")
        lines.append(",".join((f"{place}.png", *(str(int(label)) for label in generator.integers(0, 2, 10)))))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def trap(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing may be opened; it is also the working folder."""
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE)
    (folder / "experiment.toml").write_text((trained / "experiment.toml").read_text())
    (folder / MODEL_FILE).write_bytes((trained / MODEL_FILE).read_bytes())
    torch.save({"x": torch.zeros(1)}, folder / "weights.pth")
    np.savez(folder / "labels.npz", labels=np.eye(10))
    monkeypatch.chdir(folder)
    return folder


class Watch:
    """Every file under a folder that this process opens. A hook of the interpreter cannot be removed: there is one."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.opened: list[str] = []
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is not None and event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                found = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (Path would be slow for every file)
                if found != str(self.folder) and found.startswith(str(self.folder)):
                    self.opened.append(found)


WATCH: list[Watch] = []


@pytest.fixture
def watch(trap: Path) -> Iterator[Watch]:
    if not WATCH:
        WATCH.append(Watch())
    WATCH[0].folder, WATCH[0].opened = trap, []
    yield WATCH[0]
    WATCH[0].folder = None


def crafted(source: Path, file: Path, change: Change, trap: Path) -> Path:
    """The same tensors, and a description that somebody changed."""
    with safe_open(source / MODEL_FILE, "pt") as opened:
        described = json.loads(opened.metadata()[METADATA_KEY])
    change(described, trap)
    write_model(file, load_file(source / MODEL_FILE), described)
    return file


def arguments(command: str, model: Path, images: Path, out: Path) -> list[str]:
    if command == "validate":
        return ["validate", str(model), "--csv", str(images / "labels.csv"), "--images", str(images)]
    if command == "predict":
        return ["predict", str(model), str(images / "0.png")]
    kind = "pt2" if command == "export" else "safetensors"
    return ["export", str(model), "--to", kind, "--out", str(out)]


def setting(section: str, **values: Any) -> Change:
    def change(described: dict[str, Any], trap: Path) -> None:
        for key, value in values.items():
            described["experiment"][section][key] = value.replace("TRAP", str(trap))

    return change


def plugins(file: str) -> Change:
    return lambda described, trap: described["experiment"].update(plugins=[file.replace("TRAP", str(trap))])


def weights_file(described: dict[str, Any], trap: Path) -> None:
    described["experiment"]["model"].update(backbone="resnet18", weights=str(trap / "weights.pth"))


ATTACKS: dict[str, tuple[Change, str]] = {
    "absolute plug-in": (plugins("TRAP/evil.py"), "experiment.plugins"),
    "relative plug-in": (plugins("evil.py"), "experiment.plugins"),
    "run": (setting("model", weights="run:TRAP"), "experiment.model.weights"),
    "relative run": (setting("model", weights="run:."), "experiment.model.weights"),
    "weights": (weights_file, "experiment.model.weights"),
    "root": (setting("data", root="TRAP"), "experiment.data.root"),
    "engine": (lambda described, _: described["experiment"].update(engine={"workers": 4}), "experiment.engine"),
    "section": (lambda described, _: described["experiment"].update(hooks={"x": "evil"}), "experiment.hooks"),
    "key": (setting("training", hook="evil"), "experiment.training.hook"),
    "top": (lambda described, _: described.update(imports=["evil"]), "imports"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_unknown_metadata_keys_are_rejected(
    attack: str, command: str, trained: Path, images: Path, trap: Path, watch: Watch, tmp_path: Path
) -> None:
    change, key = ATTACKS[attack]
    file = crafted(trained, tmp_path / "sent.safetensors", change, trap)
    watch.opened.clear()
    found = CliRunner().invoke(app, arguments(command, file, images, tmp_path / "out"))
    assert watch.opened == []
    assert not (trap / "executed").exists()
    assert isinstance(found.exception, ConfigError), found.output
    said = str(found.exception)
    assert f"'{key}'" in said and ". " not in said and said.endswith(".")  # one sentence
    assert not (tmp_path / "out").exists()


ONLY_NAMES: dict[str, Change] = {
    "plug-in": lambda described, trap: described.update(plugins=[str(trap / "evil.py")]),
    "weights": lambda described, trap: described.update(initial_weights=f"run:{trap}"),
    "data": setting("data", name="folder:TRAP/labels.csv"),
    "partition": setting("partition", kind="file", file="TRAP/experiment.toml"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ONLY_NAMES)
def test_files_named_in_a_model_file_are_not_opened(
    name: str, command: str, trained: Path, images: Path, trap: Path, watch: Watch, tmp_path: Path
) -> None:
    """These keys are known. They say where the model comes from, and predicting does not need them."""
    file = crafted(trained, tmp_path / "sent.safetensors", ONLY_NAMES[name], trap)
    watch.opened.clear()
    found = CliRunner().invoke(app, arguments(command, file, images, tmp_path / "out"))
    assert found.exit_code == 0, found.exception
    assert watch.opened == []
    assert not (trap / "executed").exists()


def test_label_embeddings_are_in_the_file(trap: Path, watch: Watch, tmp_path: Path) -> None:
    options = {"method__name": "fedlgt", "method__layers": 1, "method__encoder": "learned", "training__rounds": 1}
    run(small(**options), tmp_path / "run")
    change = setting("method", encoder="file:TRAP/labels.npz", fine_names="TRAP/experiment.toml")
    file = crafted(tmp_path / "run", tmp_path / "sent.safetensors", change, trap)
    watch.opened.clear()
    model = load_model(file)
    try:
        model.predict(np.zeros((1, 1, 16, 16), np.uint8))
    except FedmllError as error:
        assert "does not hold the model that it describes" in str(error)  # its label embeddings were trained
    assert watch.opened == []


def test_model_file_in_a_run_folder_is_validated_too(trained: Path, trap: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("experiment.toml", "summary.json"):
        (folder / name).write_bytes((trained / name).read_bytes())
    crafted(trained, folder / MODEL_FILE, plugins("TRAP/evil.py"), trap)
    with pytest.raises(ConfigError, match=r"unknown key 'experiment.plugins'"):
        _ = load_run(folder).model
    assert not (trap / "executed").exists()


def test_program_does_not_run_a_plugin_that_a_model_file_names(
    trained: Path, images: Path, trap: Path, tmp_path: Path
) -> None:
    file = crafted(trained, tmp_path / "sent.safetensors", plugins("evil.py"), trap)
    command = [sys.executable, "-m", "fedmll", *arguments("predict", file, images, tmp_path)]
    done = subprocess.run(command, cwd=trap, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is refused because its metadata has the unknown key 'experiment.plugins'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (trap / "executed").exists()


WRONG: dict[str, dict[str, Any]] = {
    "'classes'": {"classes": "zero"},
    "'sample_shape.0'": {"sample_shape": [-1, 16, 16]},
    "'frozen'": {"frozen": {"a": 1}},
    "'plugins.0'": {"plugins": [["evil.py"]]},
    "'experiment'": {"experiment": None},
    "3 values of 'thresholds'": {"thresholds": [0.5, 0.5, 0.5]},
}


@pytest.mark.parametrize("where", WRONG)
def test_wrong_values_are_rejected_in_one_sentence(where: str, trained: Path, tmp_path: Path) -> None:
    file = crafted(
        trained, tmp_path / "sent.safetensors", lambda described, _: described.update(WRONG[where]), tmp_path
    )
    with pytest.raises(ConfigError) as caught:
        load_model(file)
    said = str(caught.value)
    assert where in said and ". " not in said and said.endswith(".")


def refused_in_one_sentence(found: Result) -> str:
    """The message of a command that refuses a file, which is one sentence."""
    assert isinstance(found.exception, FedmllError), (found.output, found.exc_info)
    said = str(found.exception)
    assert ". " not in said and said.endswith("."), said
    return said


@pytest.mark.parametrize("depth", [20, 900, 100_000])
def test_deeply_nested_metadata_is_rejected(depth: int, trained: Path, images: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep.safetensors"
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        save_file(load_file(trained / MODEL_FILE), file, {METADATA_KEY: text})
        found = CliRunner().invoke(app, arguments("predict", file, images, tmp_path))
        assert "nested deeper than 16 levels" in refused_in_one_sentence(found)


def test_very_long_metadata_is_rejected(trained: Path, images: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.safetensors"
    save_file(load_file(trained / MODEL_FILE), file, {METADATA_KEY: "[" + "[]," * 2**23 + "[]]"})
    found = CliRunner().invoke(app, arguments("predict", file, images, tmp_path))
    assert "at most 16,777,216 are accepted" in refused_in_one_sentence(found)


HUGE: dict[str, Change] = {
    "image": lambda described, _: described.update(sample_shape=[1, 60_000, 60_000]),
    "layers": lambda described, _: described["experiment"]["model"].update(channels=[60_000, 60_000]),
    "neck": lambda described, _: described["experiment"]["model"].update(channels=[60_000], width=60_000),
    "etf": lambda described, _: (
        described["experiment"].update(method={"name": "fednca-ml"}),
        described["experiment"]["model"].update(channels=[60_000]),
        described.update(classes=[f"class {number}" for number in range(60_000)], thresholds=None),
    ),  # type: ignore[dict-item,func-returns-value]
    "lift": lambda described, _: (
        described["experiment"].update(method={"name": "fed-ridge", "lift": "second", "lift_width": 4096}),
        described["experiment"]["model"].update(channels=[60_000]),
    ),  # type: ignore[dict-item,func-returns-value]
}


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("command", ["predict", "export"])
def test_huge_network_is_rejected_before_memory_is_allocated(
    what: str, command: str, trained: Path, images: Path, tmp_path: Path
) -> None:
    """The memory of the test process does not grow by more than a fraction of what the file asks for."""
    file = crafted(trained, tmp_path / "sent.safetensors", HUGE[what], tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = CliRunner().invoke(app, arguments(command, file, images, tmp_path / "out"))
    said = refused_in_one_sentence(found)
    assert "far larger than the" in said or "at most 67,108,864 values" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB


@pytest.mark.parametrize("command", ["predict", "export"])
def test_every_changed_bit_is_noticed(command: str, trained: Path, images: Path, tmp_path: Path) -> None:
    whole = (trained / MODEL_FILE).read_bytes()
    generator = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*generator.integers(0, header, 40), *generator.integers(header, len(whole), 20)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        (tmp_path / "damaged.safetensors").write_bytes(damaged)
        found = CliRunner().invoke(app, arguments(command, tmp_path / "damaged.safetensors", images, tmp_path / "out"))
        assert isinstance(found.exception, FedmllError), (place, found.output, found.exc_info)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(
    value: float, command: str, trained: Path, images: Path, tmp_path: Path
) -> None:
    model = load_model(trained / MODEL_FILE)
    weights = {name: tensor.clone() for name, tensor in model.weights.items()}
    weights["head.weight"][3, 5] = value
    write_model(tmp_path / "diverged.safetensors", weights, model.description)
    found = CliRunner().invoke(app, arguments(command, tmp_path / "diverged.safetensors", images, tmp_path / "out"))
    assert "NaN or infinite, 'head.weight' is the first" in refused_in_one_sentence(found)


VALUES: tuple[Any, ...] = (None, True, -1, 0.5, 10**30, 1e308, "", "x", [], ["x"], [[1]], {}, {"x": 1}, [None])


def test_values_of_any_type_are_used_or_rejected(trained: Path, images: Path, tmp_path: Path) -> None:
    """Every value of the metadata is replaced by values of other types; no command ends with another error."""
    described = load_model(trained / MODEL_FILE).description
    places = [(key,) for key in described]
    places += [("experiment", section) for section in described["experiment"]]
    places += [("experiment", s, key) for s, v in described["experiment"].items() if isinstance(v, dict) for key in v]
    generator = np.random.default_rng(1)
    for place in places:
        for choice in generator.choice(len(VALUES), 1):

            def change(values: dict[str, Any], _: Path, place: Any = place, value: Any = VALUES[choice]) -> None:
                for key in place[:-1]:
                    values = values[key]
                values[place[-1]] = value

            file = crafted(trained, tmp_path / "sent.safetensors", change, tmp_path)
            for command in ("predict", "copy"):
                found = CliRunner().invoke(app, arguments(command, file, images, tmp_path / "out"))
                assert found.exception is None or isinstance(found.exception, FedmllError), (
                    place,
                    VALUES[choice],
                    found.exc_info,
                )


def test_class_names_that_look_like_paths_are_stored_as_they_are(fedmll: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    names = ["/left/lung", "/right/lung", "side:/left/lung"]
    lines = [",".join(("image", *names))]
    for place in range(24):
        Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{place}.png")
        lines.append(f"{place}.png,{place % 2},{place // 2 % 2},{place // 4 % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    settings = ["data.name=folder:labels.csv", f"data.classes={json.dumps(names)}", "partition.clients=2"]
    settings += ["training.rounds=1", "model.channels=[4]"]
    code, _, error = fedmll("run", "--out", "run", *(word for text in settings for word in ("--set", text)))
    assert code == 0, error
    model = load_model(tmp_path / "run" / MODEL_FILE)
    assert list(model.classes) == names and model.description["experiment"]["data"]["classes"] == names
    assert str(tmp_path) not in json.dumps(model.description)


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/own.py and FOLDER/model.safetensors; the method is not known in the process of a test that starts one."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "own.py").write_text(PLUGIN)
    run(small(plugins=[str(folder / "own.py")], method__name="own-method", training__rounds=1), folder / "run")
    (folder / MODEL_FILE).write_bytes((folder / "run" / MODEL_FILE).read_bytes())
    return folder


def predict(folder: Path, images: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedmll", "predict", str(folder / MODEL_FILE), str(images / "0.png"), *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})


def test_plugin_is_used_only_if_the_user_passes_it(with_plugin: Path, images: Path) -> None:
    without = predict(with_plugin, images)
    assert without.returncode == 2
    said = " ".join(without.stderr.split())
    assert "It was made with the plug-in own.py: pass it with --plugin." in said
    given = predict(with_plugin, images, "--plugin", "own.py")
    assert given.returncode == 0, given.stderr
    assert "0.png" in given.stdout and "warning" not in given.stderr


def test_different_plugin_file_works_with_a_warning(with_plugin: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text(PLUGIN + "\n# a later version\n")
    given = predict(with_plugin, images, "--plugin", str(tmp_path / "changed.py"))
    assert given.returncode == 0, given.stderr
    said = " ".join(given.stderr.split())
    assert "warning:" in said and "was trained with the plug-in own.py" in said and "UserWarning" not in said
    with pytest.warns(PluginWarning, match="no file passed with --plugin has this checksum"):
        model = load_model(with_plugin / MODEL_FILE, plugins=[tmp_path / "changed.py"])
    assert model.predict(np.zeros((1, 1, 16, 16), np.uint8)).shape == (1, 10)


# ---- limits


def test_as_many_values_as_the_limit_allows_can_be_created() -> None:
    """Eight times the values of the file and 2²⁴; a tiny tensor counts as 1,024 values."""
    most = 8 * 100 + 2**24
    with AllocationLimit(Path("sent"), 100):
        torch.empty(most)
    with AllocationLimit(Path("sent"), 100), pytest.raises(ConfigError, match="far larger than the 100 values"):
        torch.empty(most + 1)
    limit = AllocationLimit(Path("sent"), 0)
    with limit:
        for _ in range(2**14):
            torch.zeros(1)
    assert limit.created == 2**24
    with limit, pytest.raises(ConfigError, match="far larger"):
        torch.zeros(1)


def test_metadata_up_to_the_longest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_metadata, "MAX_METADATA", 10)
    assert model_metadata.parse_metadata(Path("sent"), '"12345678"') == "12345678"
    with pytest.raises(ConfigError, match="11 characters, and at most 10"):
        model_metadata.parse_metadata(Path("sent"), '"123456789"')


@pytest.fixture(scope="module")
def description(trained: Path) -> dict[str, Any]:
    return dict(load_run(trained).model.description)


def described(description: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(description)) | {"checksum": "0"} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": 0}, {"round": 0}, {"window": [0.0, 1.0]}, {"sample_shape": [1, 2**13, 2**13]},
        {"pixels": {"mean": [0.5], "std": [0.5]}},
    ],
    ids=str,
)  # fmt: skip
def test_values_at_a_limit_are_accepted(description: dict[str, Any], changes: dict[str, Any]) -> None:
    model_metadata.check_complete(Path("sent"), described(description, **changes))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"clients": -1}, "clients"), ({"round": -1}, "round"), ({"classes": []}, "classes"),
        ({"classes": [""]}, "classes.0"), ({"window": [0.0]}, "window"), ({"window": [0.0, 1.0, 2.0]}, "window"),
        ({"sample_shape": []}, "sample_shape"), ({"sample_shape": [0]}, "sample_shape.0"),
        ({"sample_shape": [1, 1, 1, 1]}, "sample_shape"), ({"sample_shape": [1, 2**13, 2**13 + 1]}, "samples of shape"),
        ({"pixels": {"mean": ["0.5"], "std": [0.5]}}, "pixels.mean.0"),
        ({"thresholds": [float("inf")] * 10}, "thresholds"),
        ({"threshold_results": {"positives": [1], "recall": [np.nan], "precision": [1.0], "f1": [1.0]}}, "recall"),
    ],
    ids=str,
)  # fmt: skip
def test_values_beyond_a_limit_are_rejected(description: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        model_metadata.check_complete(Path("sent"), described(description, **changes))


def test_experiment_of_a_file_names_no_files(description: dict[str, Any]) -> None:
    values = described(description)
    values["experiment"]["data"] = {"name": "images:labels.csv"}
    values["experiment"]["partition"] = {"kind": "file", "file": "sites.csv"}
    made = model_metadata.build_experiment(Path("sent"), values)
    assert made.data.name == "images" and made.partition.file is None


def test_description_has_no_empty_values_and_a_model_is_shown_without_its_weights(trained: Path) -> None:
    model = load_run(trained).model
    sections = [section for section in model.description["experiment"].values() if isinstance(section, dict)]
    assert sections and all(value is not None for section in sections for value in section.values())
    assert "tensor(" not in repr(model)


def test_known_labels_of_several_files_are_those_of_their_rows(images: Path, tmp_path: Path) -> None:
    run(small(method__name="fedctran", method__layers=1, training__rounds=1), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    files = [images / f"{place}.png" for place in range(3)]
    known = np.full((3, 10), -1, np.int8)
    known[0, 1], known[2, 4] = 1, 0
    pixels = np.stack([np.asarray(Image.open(file))[None] for file in files])
    np.testing.assert_allclose(model.predict(files, known), model.predict(pixels, known), atol=1e-6)
    assert not np.allclose(model.predict(files, known), model.predict(files))
