"""The command line, as a user types it: output, files, and one paragraph with exit code 2 for every bad input."""

from __future__ import annotations

import csv
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED_DATA, Said
from PIL import Image

QUICK = ["--rounds", "1", "--workers", "0", "--set", "data.limit=120", "--set", "model.channels=[4,8]"]


def refused(said: Said, *words: str) -> None:
    """One paragraph on the error stream, exit code 2, no traceback."""
    assert said.code == 2, said.out + said.error
    assert said.error.startswith("error: ")
    assert "Traceback" not in said.error
    assert len(said.error.strip().splitlines()) == 1
    for word in words:
        assert word in said.error, said.error


def test_run_and_resume(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = fedmll("run", *QUICK, "--method", "fedprox", "--set", "method.mu=0.5", "--seed", 3, "--out", "here")
    assert said.code == 0, said.error
    assert "fedprox on ml-digits, round 1" in said.out
    assert "macro_auc" in said.out
    assert "results in here" in said.out
    text = (tmp_path / "here" / "experiment.toml").read_text()
    assert "mu = 0.5" in text
    assert "seed = 3" in text
    again = fedmll("resume", "here", "--workers", "0")
    assert again.code == 0
    assert again.out.splitlines()[:8] == said.out.splitlines()[:8]


def test_run_from_a_file_with_options_on_top(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "e.toml").write_text('seed = 5\n[method]\nname = "fedavg-pl"\n[training]\nrounds = 9\n')
    assert fedmll("run", "e.toml", *QUICK).code == 0
    assert fedmll("run", "e.toml", *QUICK).code == 0  # a new folder each time
    summaries = sorted((tmp_path / "runs").glob("*/summary.json"))
    assert [path.parent.name for path in summaries] == ["ml-digits-fedavg-pl-s5", "ml-digits-fedavg-pl-s5-2"]
    assert json.loads(summaries[0].read_text())["rounds"] == 1


def test_compare_writes_tables_and_continues(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = [
        "compare",
        *QUICK,
        "--methods",
        "fedavg,fedavg:weighting=equal,fedprox:mu=1+weighting=equal",
        "--out",
        "grid",
    ]
    said = fedmll(*words, "--seeds", "0")
    assert said.code == 0, said.error
    first = (tmp_path / "grid" / "fedavg" / "seed-0" / "summary.json").stat().st_mtime_ns
    said = fedmll(*words, "--seeds", "0,1")
    assert (tmp_path / "grid" / "fedavg" / "seed-0" / "summary.json").stat().st_mtime_ns == first
    table = (tmp_path / "grid" / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == words[words.index("--methods") + 1].split(",")
    assert "±" in table[2]
    with (tmp_path / "grid" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    aucs = [float(r["value"]) for r in rows if (r["method"], r["metric"]) == ("fedavg", "macro_auc")]
    assert len(aucs) == 2
    shown = f"{np.mean(aucs):.2f} ± {abs(aucs[0] - aucs[1]) / 2**0.5:.2f}"  # std of two = |a − b| / √2
    assert shown in table[2]
    assert shown in said.out
    fedmll(*words, "--seeds", "0,1", "--against", "fedavg")  # margins, paired by seed; nothing runs again
    prox = "fedprox:mu=1+weighting=equal"
    other = [float(r["value"]) for r in rows if (r["method"], r["metric"]) == (prox, "macro_auc")]
    paired = np.subtract(other, aucs)
    table = (tmp_path / "grid" / "table.md").read_text()
    assert f"\n| {prox} | {paired.mean():+.2f} ± {paired.std(ddof=1):.2f} |" in table.partition("| margin over")[2]
    refused(fedmll(*words, "--seeds", "0", "--against", "fedagv"), "did you mean 'fedavg'")
    refused(
        fedmll(*words, "--seeds", "0", "--set", "training.lr=0.5"), "holds another experiment", "nothing was changed"
    )


def test_compare_tunes_on_validation_data(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = fedmll(
        "compare", *QUICK, "--methods", "fedavg,fedprox", "--seeds", "0,1", "--tune", "training.lr=1e-6,1e-2",
        "--rounds", "6", "--set", "data.limit=600", "--set", "partition.holdout=0.3", "--out", "grid",
    )  # fmt: skip
    assert said.code == 0, said.error
    assert said.out.count("lr=0.01") == 2
    scores = {}
    for lr in ("1e-06", "0.01"):
        summary = json.loads(
            (tmp_path / "grid" / "fedavg" / f"training.lr={lr}" / "seed-0" / "summary.json").read_text()
        )
        scores[lr] = summary["metrics"]["val_macro_auc"]
    assert scores["0.01"] > scores["1e-06"]
    assert not (tmp_path / "grid" / "fedavg" / "training.lr=1e-06" / "seed-1").exists()  # only the chosen one goes on


def test_methods_data_and_help(fedmll) -> None:  # type: ignore[no-untyped-def]
    assert "fedavg-pl" in fedmll("methods").out
    one = fedmll("methods", "fedprox").out
    assert "μ/2" in one
    assert "mu" in one
    assert "0.01" in one
    fedmlp = fedmll("methods", "fedmlp").out
    assert "[method] name = 'fedmlp'" in fedmlp
    assert "first_stage (t1)" in fedmlp
    assert "ImageNet weights of ResNet-18" in fedmlp
    assert "ml-cifar10" in fedmll("data", "list").out
    page = fedmll("run", "--help")
    assert page.code == 0
    assert "--set" in page.out


def test_version_short_help_and_completion(fedmll) -> None:  # type: ignore[no-untyped-def]
    assert fedmll("--version").out == f"fedmll {version('fedmll')}\n"
    for words in ([], ["run"], ["compare"], ["data"], ["data", "describe"], ["keys", "init"], ["server"], ["join"]):
        page = fedmll(*words, "-h")
        assert page.code == 0
        assert "Usage" in page.out
    assert "--install-completion" in fedmll("-h").out
    for words in (["run"], ["compare"], ["methods"], ["data", "list"], ["data", "describe"], ["server"], ["join"]):
        assert "--plugin" in fedmll(*words, "-h").out


def test_data_describe_prints_counts_and_writes_images(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = fedmll("data", "describe", "--clients", "3", "--out", "map.png", "--set", "data.limit=90")
    assert said.code == 0, said.error
    assert "c002" in said.out
    assert Image.open(tmp_path / "map.png").size[0] > 300


def make_folder(folder: Path, rows: int = 40) -> list[list[str]]:
    images = folder / "images"
    images.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    table = [["image", "cat", "dog"]]
    for i in range(rows):
        Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(images / f"{i}.png")
        table.append([f"{i}.png", str(i % 2), "" if i % 5 == 0 else str(int(i % 3 == 0))])
    return table


def write_csv(path: Path, table: list[list[str]]) -> None:
    path.write_text("".join(",".join(row) + "\n" for row in table))


FOLDER = ["run", "--data", "folder:labels.csv", "--root", "images", "--rounds", "1", "--workers", "0", "--clients", "2"]


def test_folder_pack_and_run(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_csv(tmp_path / "labels.csv", make_folder(tmp_path))
    assert fedmll(*FOLDER).code == 0
    assert fedmll("data", "pack", "labels.csv", "--root", "images", "--out", "all.npz").code == 0
    said = fedmll("run", "--data", "packed:all.npz", "--rounds", "1", "--workers", "0", "--clients", "2")
    assert said.code == 0, said.error


def test_bad_folders_of_images_are_rejected(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    table = make_folder(tmp_path)

    def with_table(changed: list[list[str]]) -> Said:
        write_csv(tmp_path / "labels.csv", changed)
        return fedmll(*FOLDER)

    refused(with_table([*table, ["missing.png", "1", "0"]]), "missing.png")
    (tmp_path / "images" / "torn.png").write_bytes((tmp_path / "images" / "0.png").read_bytes()[:60])
    refused(with_table([*table, ["torn.png", "1", "0"]]), "torn.png")
    refused(with_table([*table, ["1.png", "2", "0"]]), "'2'", "cat")
    refused(with_table([row if i == 0 else [row[0], row[1], "0"] for i, row in enumerate(table)]), "dog")
    refused(with_table([table[0]]), "labels.csv")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/summary.json"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "--data", "cifar10", "--root", "nowhere"], ["nowhere", "cifar-10-batches-py"]),
        (["run", "--data", "ml-cifar10"], ["--root"]),
        (["run", "--data", "cifra10"], ["did you mean 'cifar10'"]),
        (["run", "--method", "fedvg"], ["did you mean 'fedavg'"]),
        (["run", "--set", "training.lrate=1"], ["training.lrate"]),
        (["run", "--set", "training.lr"], ["section.key=value"]),
        (["run", "--clients", "100000"], ["partition.clients"]),
        (["run", "--set", "partition.presence=0.01"], ["partition.presence"]),
        (["run", "--set", "annotation.kind=one-class", "--clients", "3"], ["partition.clients"]),
        (["run", "--set", "training.lr=1e30", "--set", "training.optimizer=sgd", *QUICK], ["client c00", "round 1"]),
        (["run", "missing.toml"], ["missing.toml"]),
        (["run", "--device", "tpu"], ["engine.device"]),
        (["run", "--workers", "99999999"], ["engine.workers", "1024"]),
        (["resume", "nothing"], ["nothing"]),
        (["compare", "--seeds", "a,b"], ["--seeds"]),
        (["compare", "--tune", "lr=1"], ["--tune"]),
        (["compare", "--methods", "fedavg:weights"], ["key=value"]),
        (["compare", "--methods", "fedavg,fedpox"], ["did you mean 'fedprox'"]),
        (["data", "describe", "--data", "packed:none.npz"], ["none.npz"]),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(fedmll, words: list[str], named: list[str]) -> None:  # type: ignore[no-untyped-def]
    refused(fedmll(*words), *named)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    "data", [["ml-cifar10", "--root", str(SHARED_DATA)], [f"packed:{SHARED_DATA / 'coco2014_8k_112.npz'}"]]
)
def test_real_data_can_be_described(fedmll, data: list[str]) -> None:  # type: ignore[no-untyped-def]
    said = fedmll("run", "--data", *data, "--method", "fedavg", *QUICK, "--set", "data.size=32")
    assert said.code == 0, said.error


def test_run_into_an_existing_folder_is_rejected(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused(fedmll("run", *QUICK, "--out", "mine"), "nothing was changed")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    shutil.rmtree(tmp_path / "mine")


def test_track_writes_every_round_for_tensorboard(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert fedmll("run", *QUICK, "--rounds", "2", "--track", "--out", "run").code == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(event.step, event.value) for event in events.Scalars("test/macro_auc")]
    assert curve == [(row["round"], pytest.approx(row["macro_auc"], rel=1e-6)) for row in rows]


def test_as_published_sets_what_a_paper_says_and_names_the_rest(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    own = ["run", "--as-published", "--method", "fedlgt", *QUICK, "--backbone", "convnet", "--clients", "3"]
    said = fedmll(*own, "--set", "training.local_epochs=1", "--set", "training.lr=0.5", "--out", "own")
    assert said.code == 0, said.error
    text = (tmp_path / "own" / "experiment.toml").read_text()
    assert 'optimizer = "adam"' in text and "clip = 10.0" in text and 'sampling = "size"' in text
    assert "lr = 0.5" in text  # what the user says wins
    for named in ("model.weights", "method.encoder; the paper: CLIP", "participation.count; the paper: 50 clients"):
        assert named in said.error
    other = fedmll("run", "--as-published", "fedmlp", *QUICK, "--backbone", "convnet", "--out", "other")
    assert other.code == 0, other.error
    text = (tmp_path / "other" / "experiment.toml").read_text()
    assert 'name = "fedavg"' in text and 'kind = "iid"' in text and "lr = 3e-05" in text
    refused(fedmll("run", "--as-published"), "'fedavg' has no published settings", "fedmlp")
    refused(fedmll("compare", "--as-published"), "name a method")
    grid = fedmll(
        "compare", "--as-published", "fedmlp", *QUICK, "--backbone", "convnet", "--methods", "fedavg,centralized",
        "--seeds", "0", "--out", "grid",
    )  # fmt: skip
    assert grid.code == 0, grid.error
    assert "lr = 3e-05" in (tmp_path / "grid" / "centralized" / "seed-0" / "experiment.toml").read_text()


def test_resume_with_more_rounds_and_moved_data(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_csv(tmp_path / "labels.csv", make_folder(tmp_path))
    assert fedmll(*FOLDER, "--out", "run").code == 0
    said = fedmll("resume", "run", "--rounds", "3")
    assert said.code == 0, said.error
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 3
    refused(fedmll("resume", "run", "--rounds", "2"), "has done 3 rounds")
    assert fedmll("resume", "run", "--from-round", "3").code == 0
    refused(fedmll("resume", "run", "--from-round", "9"), "--from-round 9 needs the checkpoint after round 8")
    (tmp_path / "images").rename(tmp_path / "moved")
    refused(fedmll("resume", "run"), "--root")
    assert fedmll("resume", "run", "--root", "moved").code == 0


def test_note_is_shown_once_for_all_runs(fedmll) -> None:  # type: ignore[no-untyped-def]
    rows = "fedharmony,fedharmony:blocks=false"
    said = fedmll("compare", *QUICK, "--rounds", "2", "--methods", rows, "--seeds", "0,1", "--out", "grid")
    assert said.code == 0, said.error
    assert said.out.count("method.horizon = 1.0 (half of the rounds)") == 1
