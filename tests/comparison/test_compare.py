"""compare: the plan, rejected plans, tuning, failed runs, and the tables.

Most tests replace training by a function that gives a score or raises; the last tests run the command and train.
"""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Said, small

from fedmll.comparison import compare as compare_module
from fedmll.comparison import tables
from fedmll.comparison.compare import ComparisonCallback, ComparisonRunner
from fedmll.comparison.comparison_folder import ComparisonFolder
from fedmll.comparison.plan import Variant, cross_variants, parse_variant
from fedmll.comparison.results import Comparison, ComparisonCell, main_table, margin_table
from fedmll.config.experiment import Experiment
from fedmll.core.errors import CheckpointError, ClientError, ConfigError, DataError
from fedmll.runs.run_folder import RunFolder
from fedmll.training.callbacks import Callback

Score = Callable[[Experiment], float]


class FakeTraining:
    """Replaces training: `score` gives macro_auc (on validation data twice as much), or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.ran, self.resumed, self.skipped, self.warnings = out, [], [], [], []
        self.score: Score = lambda experiment: 50.0 + experiment.seed
        self.built: list[Experiment] = []
        self.division: Callable[[Experiment], None] = lambda experiment: None
        self.labels = np.array([[1], [0]])
        monkeypatch.setattr(compare_module, "run", self._run)
        monkeypatch.setattr(compare_module, "resume", self._resume)
        monkeypatch.setattr(compare_module.federation, "build", self._build)

    def _build(self, experiment: Experiment, progress: object) -> Any:
        self.division(experiment)
        self.built.append(experiment)
        return SimpleNamespace(validation=SimpleNamespace(labels=self.labels))

    def _run(self, experiment: Experiment, folder: Path, *, callback: Callback, prepared: object) -> None:
        assert not folder.exists() or not list(folder.iterdir())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text(experiment.to_toml())
        self.ran.append(folder.relative_to(self.out).as_posix())
        self._train(experiment, folder)

    def _resume(self, folder: Path, *, callback: Callback, engine: dict[str, Any], prepared: object) -> None:
        assert engine["workers"] == 0
        self.resumed.append(folder.relative_to(self.out).as_posix())
        self._train(Experiment.load(folder / "experiment.toml"), folder)

    def _train(self, experiment: Experiment, folder: Path) -> None:
        (folder / "metrics.jsonl").write_text('{"round": 1}\n')
        score = self.score(experiment)
        metrics = {"macro_auc": score, "val_macro_auc": 2 * score, "map": None if experiment.seed == 11 else score}
        summary = {
            "method": experiment.method.name, "data": experiment.data.name, "seed": experiment.seed, "round": 2,
            "rounds": 2, "clients": 4, "classes": ["a"], "samples": {"test": 2}, "seconds": 3.0, "metrics": metrics,
            "bytes_up": 1_000_000, "bytes_down": 4_000_000,
        }  # fmt: skip
        RunFolder(folder).write_summary(summary)

    def runner(
        self, methods: str, seeds: list[int], vary: Any = None, tune: Any = None, **rest: Any
    ) -> ComparisonRunner:
        variants = [parse_variant(name) for name in methods.split(",")]
        rows = cross_variants(variants, vary or {})
        folder, callback = ComparisonFolder(self.out), ComparisonCallback()
        callback.on_warning = self.warnings.append  # type: ignore[method-assign]
        callback.on_rounds_skipped = self.skipped.append  # type: ignore[method-assign]
        runner = ComparisonRunner(small(), rows, seeds, folder, tune=tune, callback=callback, **rest)
        runner.read_folders()
        return runner

    def go(self, methods: str, seeds: list[int], retry: bool = False, **rest: Any) -> Comparison:
        self.ran, self.resumed, self.skipped, self.warnings, self.built = [], [], [], [], []
        return self.runner(methods, seeds, **rest).run_all(retry_failed=retry)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTraining:
    return FakeTraining(monkeypatch, tmp_path / "grid")


def diverged(experiment: Experiment) -> float:
    raise ClientError(f"The loss of client c003 became nan in round 2 of seed {experiment.seed}.")


def body(found: Comparison, *metrics: str) -> list[list[str]]:
    return main_table(replace(found, metrics=metrics))[1]


def notes_of(found: Comparison, metrics: Sequence[str]) -> list[str]:
    return replace(found, metrics=metrics).notes


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_rows_change_settings() -> None:
    row = parse_variant("fedprox:mu=0.5+weighting=equal+training.lr=1e-2")
    assert row.label == "fedprox:mu=0.5+weighting=equal+training.lr=1e-2"
    assert row.overrides == {
        "method.name": "fedprox", "method.mu": 0.5, "method.weighting": "equal", "training.lr": 0.01
    }  # fmt: skip
    assert parse_variant("fedavg").overrides == {"method.name": "fedavg"}
    for wrong in ("fedprox:mu", "fedprox:mu=1+weights"):
        with pytest.raises(ConfigError, match="key=value"):
            parse_variant(wrong)
    with pytest.raises(ConfigError, match=r"sets method\.mu twice"):
        parse_variant("fedprox:mu=1+method.mu=2")


def test_vary_makes_one_row_per_combination(fake: FakeTraining) -> None:
    vary = {"training.lr": [1e20, 0.2], "training.batch_size": [8, 16, 32]}
    plan = fake.runner("fedavg,fedprox:mu=1", [0], vary=vary)
    labels = [variant.label for variant in plan.variants]
    assert labels[:3] == [
        "fedavg:training.lr=1e+20+training.batch_size=8",
        "fedprox:mu=1+training.lr=1e+20+training.batch_size=8",
        "fedavg:training.lr=1e+20+training.batch_size=16",
    ]
    assert len(set(labels)) == 12
    experiments = [plan.cells[label][0][0].experiment for label in labels]
    assert {(e.method.name, e.training.lr, e.training.batch_size) for e in experiments} == {
        (name, lr, size) for name in ("fedavg", "fedprox") for lr in (1e20, 0.2) for size in (8, 16, 32)
    }
    with pytest.raises(ConfigError, match=r"'fedavg:training.lr=1\+training.lr=2' sets training.lr twice"):
        fake.runner("fedavg:training.lr=1", [0], vary={"training.lr": [2]})


@pytest.mark.parametrize(
    ("methods", "seeds", "tune", "named"),
    [
        ("fedavg,fedprox,fedavg", [0], None, "'fedavg, seed 0' and 'fedavg, seed 0'"),
        ("fedavg,fedavg:weighting=size", [3], None, "'fedavg, seed 3' and 'fedavg:weighting=size, seed 3'"),
        ("fedavg", [0, 1, 0], None, "'fedavg, seed 0' and 'fedavg, seed 0'"),
        ("fedavg", [0], {"training.lr": [0.1, 0.2, 0.1]}, "'fedavg, lr=0.1, seed 0' and"),
        ("fedavg:training.lr=0.1", [0], {"training.lr": [0.1, 0.2]}, "sets training.lr twice"),
        ("fedavg", [0], {"method.mu": [1, 2]}, "no key 'method.mu'"),
    ],
)
def test_rejected_before_any_run(fake: FakeTraining, methods: str, seeds: list[int], tune: Any, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        fake.go(methods, seeds, tune=tune)
    assert named in str(error.value)
    assert fake.ran == [] and not fake.out.exists()


def test_rows_with_the_same_folder_are_rejected(fake: FakeTraining) -> None:
    """The folder's name has - for / and :, so that two rows could meet there."""
    with pytest.raises(ConfigError, match=r"twice: .*weights=a/b.*weights=a-b"):
        fake.runner("fedavg:model.weights=a/b,fedavg:model.weights=a-b", [0])


def test_each_run_has_a_folder_and_continues_there(fake: FakeTraining) -> None:
    seeds = list(range(12))
    found = fake.go("fedavg,fedavg:weighting=equal", seeds)
    assert fake.ran == [f"{row}/seed-{seed}" for row in ("fedavg", "fedavg-weighting=equal") for seed in seeds]
    assert [cell.seed for cell in found.rows[0].cells] == seeds
    assert fake.skipped == []
    (fake.out / "fedavg" / "seed-10" / "summary.json").unlink()  # as if it had been killed
    again = fake.go("fedavg,fedavg:weighting=equal", seeds)
    assert (fake.ran, fake.resumed) == ([], ["fedavg/seed-10"])
    assert fake.skipped == [2] * 23
    assert body(again, "macro_auc") == body(found, "macro_auc")
    with pytest.raises(ConfigError, match=r"seed-0 holds another experiment \(training\.lr differ\); nothing"):
        other = ComparisonRunner(small(training__lr=0.5), [Variant("fedavg", {})], seeds, ComparisonFolder(fake.out))
        other.read_folders()


def test_data_is_prepared_once_for_runs_that_share_it(fake: FakeTraining) -> None:
    fake.go("fedavg,fedprox", [4])
    assert [e.seed for e in fake.built] == [4]
    fake.go("fedavg:partition.beta=0.3,fedavg:partition.beta=0.4,fedavg:partition.beta=0.4+weighting=equal", [4])
    assert [e.partition.beta for e in fake.built] == [0.3, 0.4]
    fake.go("fedavg:annotation.kind=missing,fedavg:annotation.kind=missing+annotation.missing=1", [5])
    assert len(fake.built) == 2
    fake.go("fedavg:training.batch_size=8,fedavg:training.batch_size=9", [6, 7])
    assert len(fake.built) == 4


# ---- tuning ---------------------------------------------------------------------------------------------------------

RATES = {"training.lr": [0.1, 0.2, 0.3], "training.weight_decay": [0.0, 0.5]}


def best_at(lr: float, decay: float) -> Score:
    return lambda e: 60.0 - abs(e.training.lr - lr) - abs(e.training.weight_decay - decay) + e.seed


def test_best_combination_is_run_with_the_other_seeds(fake: FakeTraining) -> None:
    fake.score = lambda e: best_at(0.2, 0.0 if e.method.name == "fedavg" else 0.5)(e)
    found = fake.go("fedavg,fedprox", [3, 4, 5], tune=RATES)
    assert [row.setting for row in found.rows] == [
        {"training.lr": 0.2, "training.weight_decay": 0.0}, {"training.lr": 0.2, "training.weight_decay": 0.5}
    ]  # fmt: skip
    assert len(fake.ran) == 2 * (6 + 2)
    assert fake.ran[:6] == [
        f"fedavg/training.lr={lr}+training.weight_decay={decay}/seed-3"
        for lr in (0.1, 0.2, 0.3)
        for decay in (0.0, 0.5)
    ]
    assert fake.ran[6:8] == [f"fedavg/training.lr=0.2+training.weight_decay=0.0/seed-{seed}" for seed in (4, 5)]
    assert main_table(replace(found, metrics=["macro_auc"]))[0] == [
        "method",
        "tuned",
        "macro_auc",
        "s/round",
        "MB/round",
    ]
    assert body(found, "macro_auc")[0][:3] == ["fedavg", "lr=0.2, weight_decay=0.0", "64.00 ± 1.00"]
    fake.go("fedavg,fedprox", [3, 4, 5], tune=RATES)
    assert fake.ran == fake.resumed == []


def test_tune_seed_need_not_be_in_the_table(fake: FakeTraining) -> None:
    fake.score = best_at(0.2, 0.5)
    plan = fake.runner("fedavg", [3, 4], tune=RATES, tune_seed=100)
    assert plan.total_rounds == 8 * small().training.rounds
    found = plan.run_all()
    chosen = "training.lr=0.2+training.weight_decay=0.5"
    assert len(fake.ran) == 6 + 2 and all(name.endswith("seed-100") for name in fake.ran[:6])
    assert fake.ran[6:] == [f"fedavg/{chosen}/seed-{seed}" for seed in (3, 4)]
    assert found.rows[0].values("macro_auc") == {3: 63.0, 4: 64.0}  # the seed of the choice is not in the table
    fake.go("fedavg", [3, 4], tune=RATES, tune_seed=100)
    assert fake.ran == []
    fake.go("fedavg", [3, 4, 5], tune=RATES, tune_seed=4)  # or which it has
    assert fake.ran[-1] == f"fedavg/{chosen}/seed-5" and len(fake.ran) == 5 + 1
    with pytest.raises(ConfigError, match="with --tune"):
        fake.runner("fedavg", [3, 4], tune_seed=100)


def test_first_of_equally_good_values_is_chosen(fake: FakeTraining) -> None:
    fake.score = lambda e: 50.0
    assert fake.go("fedavg", [0], tune=RATES).rows[0].setting == {"training.lr": 0.1, "training.weight_decay": 0.0}


def test_failed_value_is_not_chosen(fake: FakeTraining) -> None:
    def score(e: Experiment) -> float:
        return diverged(e) if e.training.lr > 0.15 else best_at(0.1, 0.5)(e)

    fake.score = score
    found = fake.go("fedavg", [0, 1], tune=RATES)
    assert found.rows[0].setting == {"training.lr": 0.1, "training.weight_decay": 0.5}
    assert len(found.failed) == 4 and len(found.runs) == 7
    assert body(found, "macro_auc")[0][2] == "60.50 ± 0.71"  # both seeds of the chosen one are there
    assert "4 of 7 runs failed" in notes_of(found, [])[0]
    assert notes_of(found, [])[1].startswith(
        "failed: fedavg, lr=0.2, weight_decay=0.0, seed 0: The loss of client c003"
    )


def test_row_whose_values_all_fail_does_not_stop_the_others(fake: FakeTraining) -> None:
    fake.score = lambda e: diverged(e) if e.method.name == "fedprox" else best_at(0.2, 0.0)(e)
    plan = fake.runner("fedprox,fedavg", [0, 1, 2], tune=RATES)
    found = plan.run_all()
    first, second = body(found, "macro_auc")
    assert first == ["fedprox", "–", "failed", "failed", "failed"]
    assert second[2] == "61.00 ± 1.00"
    assert len(found.runs) == 6 + 6 + 2 and len(found.failed) == 6
    assert not any("not all runs are done" in note for note in notes_of(found, ["macro_auc"]))
    # each of the 8 runs of fedavg does its 2 rounds; the 6 of fedprox break off after one, its other 2 never begin
    assert plan.total_rounds == 2 * (6 + 2) * 2
    assert plan.total_rounds == 8 * 2 + 6 * 1 + sum(fake.skipped)
    assert margin_table(replace(found, metrics=["macro_auc"]), "fedprox")[1] == [["fedavg", "failed"]]


@pytest.mark.parametrize(
    ("best", "named"),
    [
        (0.1, "fedavg: its best training.lr, 0.1, is the lowest of the grid"),
        (0.3, "fedavg: its best training.lr, 0.3, is the highest of the grid"),
        (0.2, None),
    ],
)
def test_best_value_at_the_edge_of_the_grid_is_noted(fake: FakeTraining, best: float, named: str | None) -> None:
    fake.score = best_at(best, 0.0)
    found = fake.go("fedavg", [0], tune={"training.lr": [0.2, 0.3, 0.1]})
    assert len(notes_of(found, [])) == (named is not None)
    assert all(note.startswith(named or "") for note in notes_of(found, []))


def test_edges_of_several_keys_are_noted(fake: FakeTraining) -> None:
    fake.score = best_at(0.1, 0.3)
    tune = {"training.lr": [0.1, 0.2, 0.3], "training.weight_decay": [0.0, 0.3, 0.5], "fedprox:mu": [0.5, 1.0]}
    found = fake.go("fedavg,fedprox", [0], tune=tune)
    assert [note.partition(" of the grid")[0] for note in notes_of(found, [])] == [
        "fedavg: its best training.lr, 0.1, is the lowest",
        "fedprox: its best training.lr, 0.1, is the lowest",
        "fedprox: its best method.mu, 0.5, is the lowest",
    ]
    assert len(fake.ran) == 9 + 18


def test_keys_of_a_method_are_tried_for_its_rows_only(fake: FakeTraining) -> None:
    fake.score = lambda e: 60.0 + e.seed - (abs(e.method.options["mu"] - 1) if e.method.name == "fedprox" else 0)
    tune = {"fedprox:mu": [0.5, 1.0], "fedprox:training.lr": [0.1, 0.2]}
    plan = fake.runner("fedavg,fedprox,fedprox:weighting=equal", [3, 4], tune=tune, tune_seed=9)
    assert plan.total_rounds == (2 + 2 * (4 + 2)) * small().training.rounds
    found = plan.run_all()
    assert fake.ran[:2] == ["fedavg/seed-3", "fedavg/seed-4"]  # no setting is chosen for it, and no seed spent on that
    chosen = "method.mu=1.0+training.lr=0.1"
    assert fake.ran[6:8] == [f"fedprox/{chosen}/seed-3", f"fedprox/{chosen}/seed-4"]
    assert [row.setting for row in found.rows] == [{}] + 2 * [{"method.mu": 1.0, "training.lr": 0.1}]
    assert [row[1] for row in body(found, "macro_auc")] == ["–", "mu=1.0, lr=0.1", "mu=1.0, lr=0.1"]
    text = tables.tuning_markdown(found)
    assert text.startswith("## fedprox\n") and "## fedprox:weighting=equal\n" in text and "## fedavg" not in text
    assert "| mu=0.5, lr=0.1 | 137.00 |  |" in text and "| mu=1.0, lr=0.1 | 138.00 | chosen |" in text
    assert "val_macro_auc, seed 9" in text
    for wrong, named in (
        ({"fedprx:mu": [1]}, "did you mean 'fedprox'"),
        ({"fedprox:mu": [1], "method.mu": [2]}, "twice"),
    ):
        with pytest.raises(ConfigError, match=named):
            fake.runner("fedprox", [0], tune=wrong)


def test_both_of_two_values_are_edges(fake: FakeTraining) -> None:
    fake.score = best_at(0.1, 0.0)
    assert "0.1, is the lowest" in notes_of(fake.go("fedavg", [0], tune={"training.lr": [0.1, 0.2]}), [])[0]


def test_text_and_single_values_have_no_edge(fake: FakeTraining) -> None:
    tune = {"training.optimizer": ["adam", "sgd"], "training.lr": [0.1], "method.weighting": ["size", "equal"]}
    assert notes_of(fake.go("fedavg", [0], tune=tune), []) == []


def test_tuning_without_validation_data_is_rejected_before_any_run(fake: FakeTraining) -> None:
    for labels in (np.zeros((0, 3)), np.array([[1, -1], [1, 0]])):  # nothing; no class with both
        fake.labels = labels
        with pytest.raises(ConfigError, match=rf"val_macro_auc.*{len(labels)} validation samples.*partition.holdout"):
            fake.go("fedavg", [0, 1], tune=RATES)
        assert fake.ran == []
    fake.go("fedavg", [0, 1])  # nobody needs it without --tune
    fake.labels = np.array([[1, -1], [0, 0]])  # one class with both is enough
    fake.go("fedavg", [2], tune=RATES)
    fake.labels = np.zeros((0, 3))  # and the other seeds do not choose
    fake.go("fedavg", [2, 1], tune=RATES)
    assert len(fake.ran) == 1


# ---- failures -------------------------------------------------------------------------------------------------------


def test_failed_run_is_shown_remembered_and_not_repeated(fake: FakeTraining) -> None:
    fake.score = lambda e: diverged(e) if (e.method.name, e.seed) == ("fedprox", 2) else 50.0 + 2 * e.seed
    found = fake.go("fedavg,fedprox", [0, 2, 12])
    assert fake.ran[-1] == "fedprox/seed-12"  # it went on
    assert fake.warnings == [f"failed: fedprox, seed 2: {found.failed[0].failure}"]
    assert body(found, "macro_auc")[0][1] == "59.33 ± 12.86"
    assert body(found, "macro_auc")[1] == [
        "fedprox",
        "62.00 ± 16.97 (2 of 3)",
        "1.50 ± 0.00 (2 of 3)",
        "2.50 ± 0.00 (2 of 3)",
    ]
    assert notes_of(found, ["macro_auc"]) == [
        "1 of 6 runs failed (--retry-failed runs them again):",
        "failed: fedprox, seed 2: The loss of client c003 became nan in round 2 of seed 2.",
    ]
    saved = json.loads((fake.out / "fedprox" / "seed-2" / "failed.json").read_text())
    assert saved == {"error": "ClientError", "reason": "The loss of client c003 became nan in round 2 of seed 2."}
    again = fake.go("fedavg,fedprox", [0, 2, 12])
    assert fake.ran == fake.resumed == fake.warnings == []
    assert sum(fake.skipped) == 12
    assert body(again, "macro_auc") == body(found, "macro_auc") and notes_of(again, []) == notes_of(found, [])


def test_retry_failed_runs_again_and_removes_the_failure(fake: FakeTraining) -> None:
    fake.score = diverged
    fake.go("fedavg", [0, 1])
    fake.score = lambda e: diverged(e) if e.seed == 1 else 50.0
    found = fake.go("fedavg", [0, 1], retry=True)
    assert fake.resumed == ["fedavg/seed-0", "fedavg/seed-1"]
    assert body(found, "macro_auc")[0][1] == "50.00 (1 of 2)"
    assert not (fake.out / "fedavg" / "seed-0" / "failed.json").exists()
    assert (fake.out / "fedavg" / "seed-1" / "failed.json").exists()


def test_margins_pair_the_seeds_that_both_finished(fake: FakeTraining) -> None:
    fake.score = lambda e: (
        diverged(e)
        if (e.method.name, e.seed) in {("fedavg", 0), ("fedprox", 3)}
        else 50 + e.seed**2 + (e.method.name == "fedprox") * (1 + e.seed)
    )
    found = fake.go("fedavg,fedprox", [0, 1, 2, 3])
    header, rows = margin_table(replace(found, metrics=["macro_auc"]), "fedavg")
    assert header == ["margin over fedavg", "macro_auc"]
    assert rows == [["fedprox", "+2.50 ± 0.71 (2 of 4)"]]  # 1 + 1 and 1 + 2


def test_rejected_run_is_shown_but_not_remembered(fake: FakeTraining) -> None:
    def refuse(error: Exception) -> Score:
        def score(e: Experiment) -> float:
            if e.seed == 0:
                raise error
            return 50.0

        return score

    for error in (ConfigError("Another process is running"), CheckpointError("it is damaged")):
        fake.score = refuse(error)
        found = fake.go("fedavg", [0, 1])
        assert [cell.failure for cell in found.failed] == [str(error)]
        assert not list(fake.out.rglob("failed.json"))
    fake.score = lambda e: 50.0
    assert fake.go("fedavg", [0, 1]).failed == []


def test_impossible_partition_fails_only_its_own_row(fake: FakeTraining) -> None:
    def division(e: Experiment) -> None:
        if e.partition.clients == 900:
            raise ConfigError("partition.clients = 900 is more than the 160 training samples.")

    fake.division = division
    found = fake.go("fedavg", [0], vary={"partition.clients": [4, 900, 5]})
    assert [row[1] for row in body(found, "macro_auc")] == ["50.00", "failed", "50.00"]
    assert fake.skipped == [2]
    fake.division = lambda e: None
    assert fake.go("fedavg", [0], vary={"partition.clients": [4, 900, 5]}).failed == []


def test_unreadable_data_and_programming_errors_stop_the_comparison(fake: FakeTraining) -> None:
    def unreadable(e: Experiment) -> None:
        raise DataError("The data was not found.")

    fake.division = unreadable
    with pytest.raises(DataError):
        fake.go("fedavg", [0])
    fake.division = lambda e: None

    def mistake(e: Experiment) -> float:
        raise ZeroDivisionError

    fake.score = mistake
    with pytest.raises(ZeroDivisionError):
        fake.go("fedavg", [0])
    assert not list(fake.out.rglob("failed.json"))


# ---- the tables -----------------------------------------------------------------------------------------------------


def test_undefined_metric_is_a_dash_with_a_reason(fake: FakeTraining) -> None:
    found = fake.go("fedavg", [10, 11])  # the pretended map of seed 11 is null, and accuracy is never there
    assert body(found, "accuracy", "map", "macro_auc")[0][1:4] == ["–", "–", "60.50 ± 0.71"]
    assert notes_of(found, ["accuracy", "map", "macro_auc", "s/round"]) == [
        "accuracy is undefined (–) without test samples that all have exactly one label.",
        "map is undefined (–) without a class with a positive in the test data.",
    ]


def test_incomplete_table_has_a_note(fake: FakeTraining) -> None:
    def stopped(e: Experiment) -> float:
        if (e.method.name, e.seed) == ("fedprox", 1):
            raise KeyboardInterrupt
        return 50.0

    fake.score = stopped
    plan = fake.runner("fedavg,fedprox,fedavg-pl", [0, 1])
    with pytest.raises(KeyboardInterrupt):
        plan.run_all()
    found = plan.comparison()
    assert [row[1] for row in body(found, "macro_auc")] == ["50.00 ± 0.00", "50.00 (1 of 2)", "not run"]
    assert notes_of(found, []) == ["not all runs are done: the same command with the same --out continues."]
    assert notes_of(fake.runner("fedavg", [0, 1]).comparison(), []) == []
    # what an earlier command finished is in the table before this one comes to it
    fake.score = lambda e: 50.0
    fake.go("fedavg-pl", [0, 1])
    assert body(fake.runner("fedavg,fedprox,fedavg-pl", [0, 1]).comparison(), "macro_auc")[2][1] == "50.00 ± 0.00"


def test_nothing_is_chosen_before_tuning_is_complete(fake: FakeTraining) -> None:
    def stopped(e: Experiment) -> float:
        if e.training.lr == 0.2:
            raise KeyboardInterrupt
        return 50.0

    fake.score = stopped
    plan = fake.runner("fedavg", [0], tune={"training.lr": [0.1, 0.2]})
    with pytest.raises(KeyboardInterrupt):
        plan.run_all()
    found = plan.comparison()
    assert body(found, "macro_auc") == [["fedavg", "–", "not run", "not run", "not run"]]
    assert "not all runs are done" in notes_of(found, [])[0]


def test_repeated_column_is_shown_once(fake: FakeTraining) -> None:
    header, rows = main_table(replace(fake.go("fedavg", [0]), metrics=["MB/round", "macro_auc", "macro_auc"]))
    assert header == ["method", "MB/round", "macro_auc", "s/round"]
    assert rows == [["fedavg", "2.50", "50.00", "1.50"]]  # 5 MB and 3 s in 2 rounds; one seed has no spread


def test_description_column(fake: FakeTraining) -> None:
    names = "fedavg,fed-ridge,fed-ridge:model.weights=/w.safetensors+model.backbone=resnet18"
    found = fake.go(names, [0], metrics=["description", "macro_auc"], against="fedavg")
    header, rows = main_table(found)
    assert header == ["method", "macro_auc", "s/round", "MB/round", "description"]
    told = [row[-1] for row in rows]
    assert told[0] == "BCE over all classes, unknown targets count as absent; average weighted by number of samples"
    assert told[1] == told[2] + "; on features of an untrained convnet"
    assert margin_table(found, "fedavg")[0] == ["margin over fedavg", "macro_auc"]
    assert found.notes == []


def test_csv_has_every_number_and_every_failure(fake: FakeTraining) -> None:
    fake.score = lambda e: diverged(e) if e.seed == 10 or e.training.lr == 0.2 else 50.0 + e.seed
    found = fake.go("fedavg", [9, 10, 11], tune={"training.lr": [0.1, 0.2]})
    tables.write_runs_csv(found, fake.out / "table.csv")
    with (fake.out / "table.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["method", "tuned", "seed", "metric", "value"]
    assert ["fedavg", "training.lr=0.1", "9", "macro_auc", "59.0"] in lines
    assert ["fedavg", "training.lr=0.1", "11", "s/round", "1.5"] in lines
    assert ["fedavg", "training.lr=0.1", "11", "map", "nan"] in lines
    failed = [line[:4] for line in lines if line[3] == "failed"]
    assert failed == [
        ["fedavg", "training.lr=0.2", "9", "failed"], ["fedavg", "training.lr=0.1", "10", "failed"]
    ]  # fmt: skip
    assert len(lines) == 1 + 2 * 5 + 2


# ---- the command ----------------------------------------------------------------------------------------------------

QUICK = [
    "--rounds", "1", "--workers", "0", "--clients", "3", "--set", "data.limit=90", "--set", "model.channels=[4,8]",
    "--set", "training.optimizer=sgd", "--out", "grid",
]  # fmt: skip


@pytest.fixture
def compare(fedmll: Callable[..., Said]) -> Iterator[Callable[..., Said]]:
    before = signal.getsignal(signal.SIGTERM)
    yield partial(fedmll, "compare")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--metrics", "map,macro_acu"], ["no metric 'macro_acu'", "did you mean 'macro_auc'?"]),
        (["--metrics", "zzz"], ["no metric 'zzz'", "known: MB/round, accuracy", "description"]),
        (["--seeds", "0,1,0"], ["--seeds names 0 twice"]),
        (["--seeds", "0,x"], ["--seeds takes whole numbers", "0,x"]),
        (["--methods", "fedavg,fedavg"], ["'fedavg, seed 0' and 'fedavg, seed 0'"]),
        (["--tune", "training.lr"], ["--tune takes section.key=a,b,c", "'training.lr'"]),
        (["--tune", "training.lr="], ["--tune takes section.key=a,b,c"]),
        (["--tune", "fedharmony:beta=1,2"], ["is for 'fedharmony', which is not a row here"]),
        (["--vary", "fedprox:mu=1,2"], ["--vary takes section.key=a,b,c", "'fedprox:mu=1,2'"]),
        (["--track", "tensorbord"], ["no tracker 'tensorbord'", "did you mean 'tensorboard'?"]),
        (["--tune", "training.lr=1,2", "--tune", "training.lr=3"], ["--tune names training.lr twice"]),
        (["--vary", "training.lr=1e-3,1,0.001"], ["--vary training.lr=1e-3,1,0.001 names 0.001 twice"]),
        (["--vary", "training.lr=1,2", "--tune", "training.lr=1,2"], ["sets training.lr twice"]),
    ],
)
def test_bad_options_are_rejected_before_any_run(
    compare: Callable[..., Said], tmp_path: Path, words: list[str], named: list[str]
) -> None:
    said = compare(*QUICK, *words)
    assert said.code == 2 and said.error.startswith("error: ") and len(said.error.strip().splitlines()) == 1
    for text in named:
        assert text in said.error
    assert not (tmp_path / "grid").exists()


def test_lists_and_text_as_values(fake: FakeTraining, compare: Callable[..., Said]) -> None:
    fake.out = Path("grid")
    said = compare(
        *QUICK, "--methods", "fedavg", "--seeds", "0", "--vary", "model.channels=[4,8],[8,16]",
        "--vary", "method.weighting=size,equal", "--metrics", "macro_auc , s/round",
    )  # fmt: skip
    assert said.code == 0, said.error
    assert sorted(fake.ran) == [
        f"fedavg-model.channels=[{a}]+method.weighting={b}/seed-0" for a in ("4, 8", "8, 16") for b in ("equal", "size")
    ]
    assert "fedavg:model.channels=[4, 8]+method.weighting=size" in said.out
    assert [line.split("|")[2:5] for line in Path("grid/table.md").read_text().splitlines()[:1]] == [
        [" macro_auc ", " s/round ", " MB/round "]
    ]


def test_ctrl_c_writes_the_table_of_finished_runs(fake: FakeTraining, compare: Callable[..., Said]) -> None:
    def stopped(e: Experiment) -> float:
        if e.seed == 1:
            raise KeyboardInterrupt
        return 50.0

    fake.out, fake.score = Path("grid"), stopped
    said = compare(*QUICK, "--methods", "fedavg,fedprox", "--seeds", "0,1", "--against", "fedavg")
    assert said.code == 130
    assert "the same command with --out grid" in said.error and "grid/table.md" in said.error
    text = Path("grid/table.md").read_text()
    assert "| fedavg | 50.00 (1 of 2) |" in text and "| fedprox | not run |" in text
    assert "\n- not all runs are done: the same command with the same --out continues.\n" in text
    assert "fedavg,,0,macro_auc,50.0" in Path("grid/table.csv").read_text()


def test_no_table_if_no_run_was_done(fake: FakeTraining, compare: Callable[..., Said]) -> None:
    def unreadable(e: Experiment) -> None:
        raise DataError("The data was not found.")

    fake.out, fake.division = Path("grid"), unreadable
    said = compare(*QUICK, "--methods", "fedavg", "--seeds", "0")
    assert said.code == 2 and "The data was not found." in said.error
    assert [path.name for path in Path("grid").iterdir()] == [".lock"]


def test_diverged_row_does_not_stop_the_others(compare: Callable[..., Said]) -> None:
    """Real training: the first row's learning rate makes its weights infinite."""
    words = [*QUICK, "--methods", "fedprox:training.lr=1e38,fedavg", "--seeds", "0,1", "--against", "fedavg"]
    said = compare(*words)
    assert said.code == 0, said.error
    assert "2 of 4 runs failed" in said.out
    assert "failed: fedprox:training.lr=1e38, seed 1: " in said.out
    text = Path("grid/table.md").read_text()
    assert text.startswith("| method | macro_auc | map | macro_f1 | macro_f1_tuned | bacc | s/round | MB/round |\n")
    assert "| fedprox:training.lr=1e38 | failed |" in text and "| fedavg | " in text and "±" in text
    assert "- failed: fedprox:training.lr=1e38, seed 0: " in text and "round 1" in text
    folders = [Path(f"grid/fedprox-training.lr=1e38/seed-{seed}") for seed in (0, 1)]
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert compare(*words).code == 0
    assert [(folder / "log.txt").read_text() for folder in folders] == logs
    assert compare(*words, "--retry-failed").code == 0
    assert all(len((f / "log.txt").read_text()) > len(log) for f, log in zip(folders, logs, strict=True))
    assert Path("grid/table.md").read_text() == text


def test_exit_code_1_if_every_run_failed(compare: Callable[..., Said]) -> None:
    said = compare(*QUICK, "--methods", "fedavg:training.lr=1e38", "--seeds", "0")
    assert said.code == 1
    assert "1 of 1 runs failed" in said.out


def test_centralized_is_not_ranked_in_the_latex_table(fake: FakeTraining, compare: Callable[..., Said]) -> None:
    scores = {"centralized": 90.0, "fedavg": 60.0, "fedprox": 50.0}
    fake.out, fake.score = Path("grid"), lambda e: scores[e.method.name]
    methods = ["--methods", "centralized,fedavg,fedprox", "--metrics", "macro_auc"]
    assert compare(*QUICK, *methods, "--seeds", "0,1").code == 0
    text = Path("grid/table.tex").read_text()
    assert r"centralized & 90.00 $\pm$ 0.00 &" in text
    assert r"fedavg & \textbf{60.00 $\pm$ 0.00} &" in text and r"fedprox & \underline{50.00 $\pm$ 0.00} &" in text
    assert "centralized is not ranked, because it has all data in one place." in text.splitlines()[0]


@pytest.mark.parametrize(
    ("file", "content", "advice"),
    [
        ("summary.json", '{"metrics": {', "`fedmll resume grid/fedavg/seed-0` writes it again."),
        ("summary.json", '{"metrics": {"map": "high"}}', "`fedmll resume grid/fedavg/seed-0` writes it again."),
        ("experiment.toml", "seed = [", "experiment.toml"),
        ("data_fingerprint.json", '{"training": 5}', "Restore it from a copy."),
    ],
)
def test_damaged_file_of_one_run_does_not_end_the_comparison(
    fake: FakeTraining, compare: Callable[..., Said], file: str, content: str, advice: str
) -> None:
    fake.out = Path("grid")
    words = [*QUICK, "--methods", "fedavg,fedprox", "--seeds", "0,1", "--metrics", "macro_auc"]
    assert compare(*words).code == 0
    Path("grid/fedavg/seed-0", file).write_text(content)
    Path("grid/fedprox/seed-1/summary.json").unlink()
    fake.resumed = []
    said = compare(*words)
    assert said.code == 0 and fake.resumed == ["fedprox/seed-1"]
    (line,) = (line for line in said.error.splitlines() if f"grid/fedavg/seed-0/{file}" in line)
    assert line.startswith("warning: fedavg, seed 0: ") and advice in line
    assert Path("grid/fedavg/seed-0", file).read_text() == content
    if file != "data_fingerprint.json":
        table = Path("grid/table.md").read_text()
        assert (
            "| fedavg | 51.00 (1 of 2) |" in table and f"- failed: fedavg, seed 0: grid/fedavg/seed-0/{file}" in table
        )
    if file == "summary.json":
        assert compare(*words, "--retry-failed").code == 0
        assert (
            fake.resumed[1:] == ["fedavg/seed-0"] and "| fedavg | 50.50 ± 0.71 |" in Path("grid/table.md").read_text()
        )


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_compare_from_python(fake: FakeTraining) -> None:
    class Watch(compare_module.ComparisonCallback):
        rounds, cells, gone = 0, [], 0  # type: ignore[var-annotated]

        def on_comparison_start(self, rounds: int) -> None:
            self.rounds = rounds

        def on_cell_start(self, cell: ComparisonCell) -> None:
            self.cells.append(str(cell))

        def on_rounds_skipped(self, rounds: int) -> None:
            self.gone += rounds

    watch = Watch()
    found = compare_module.compare(
        small(), ["fedavg", "fedprox:mu=1"], [0, 1], fake.out, against="fedavg", metrics=["macro_auc"], callback=watch
    )
    assert (watch.rounds, watch.gone) == (8, 0)
    assert "fedprox:mu=1, seed 1" in watch.cells
    text = (fake.out / "table.md").read_text()
    assert text.startswith(repr(found))
    assert "margin over fedavg" in text
    assert "fedprox:mu=1" in found._repr_html_() and found._repr_html_().startswith("<table>")
    assert (fake.out / "table.csv").is_file()
    compare_module.compare(small(), ["fedavg", "fedprox:mu=1"], [0, 1], fake.out, callback=watch)
    assert watch.gone == 8
    with pytest.raises(ConfigError, match="no metric 'macro_acu'"):
        compare_module.compare(small(), ["fedavg"], [0], fake.out, metrics=["macro_acu"])


def test_compare_without_a_folder_returns_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_module.compare(small(training__rounds=1), ["fedavg"], [0])
    assert len(found.finished) == 1
    assert not found.finished[0].path.exists()
