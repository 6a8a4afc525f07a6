"""Was it worth joining: a site's own model beside the common one, and the page that says so."""

from __future__ import annotations

import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from consortium import CLASSES, Consortium, write_consortium
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fedmll import run
from fedmll.core.errors import ClientError, ConfigError
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.site import benefit_report
from fedmll.deploy.site.benefit_report import train_local_baseline
from fedmll.deploy.site.site_config import Site
from fedmll.deploy.site.worker import SiteWorker
from fedmll.evaluation import metrics
from fedmll.evaluation.bootstrap import Estimate, ModelOutput, PairedComparison
from fedmll.evaluation.histograms import score_histograms
from fedmll.evaluation.thresholds import choose_thresholds
from fedmll.inference.model_file import SavedModel, describe_model, load_model, write_model
from fedmll.reports.site_report import (
    FEDERATED,
    FEDERATED_TUNED,
    LOCAL,
    LOCAL_TUNED,
    SiteComparison,
    describe_classes,
    describe_verdict,
    render_site_report,
)

SETTINGS = {"partition__holdout": 0.6, "training__rounds": 3, "training__lr": 0.01}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Enough held-out images at site-a for ten of most digits in each half."""
    patch = pytest.MonkeyPatch()
    patch.setattr("consortium.SIZES", {"site-a": 500, "site-b": 60, "site-c": 60, "test": 60})
    made = write_consortium(tmp_path_factory.mktemp("consortium"), with_keys=False)
    patch.undo()
    return made


def worker_of(large: Consortium, name: str, memory: Path, **changes: object) -> SiteWorker:
    experiment = resolve_for_sites(large.server(**SETTINGS | changes), (1, 8, 8))
    setup = StudySetup(
        run="run1", experiment=settings_for_sites(experiment), classes=tuple(CLASSES), shape=(1, 8, 8), clients=3
    )
    home = large.folder
    site = Site(
        name=name, csv=home / name / "labels.csv", images=home / "images", state_dir=memory / name, device="cpu"
    )
    return SiteWorker(site, setup, lambda text: None)


def model_at(worker: SiteWorker, weights: dict) -> SavedModel:
    file = worker.site.state_dir / "model.safetensors"
    described = describe_model(worker.trainer.task.experiment, worker.trainer, None, 3)
    write_model(file, weights | worker.trainer.frozen(), described)
    return load_model(file)


@pytest.fixture(scope="module")
def joined(large: Consortium, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    result = run(large.local(**SETTINGS))
    worker = worker_of(large, "site-a", tmp_path_factory.mktemp("joined"))
    model, said = model_at(worker, result.weights), list[str]()
    file = benefit_report.write_site_report(worker, model, said.append)
    found, own = benefit_report.compare_models(worker, model)
    return SimpleNamespace(worker=worker, model=model, said=said, file=file, worth=found, own=own)


def test_local_baseline_equals_the_method_local_only(large: Consortium, tmp_path: Path) -> None:
    """One client's federation is the client alone: the same figures as the method local-only of a simulation."""
    changes = {"partition__holdout": 0.3, "method__name": "fedavg-pl"}
    result = run(large.local(**SETTINGS | changes | {"method__name": "local-only"}))
    worker = worker_of(large, "site-b", tmp_path, **changes)
    done: list[tuple[int, int, str]] = []
    scores, instead = train_local_baseline(worker, np.arange(4), lambda *what: done.append(what))
    assert instead is None
    found = metrics.evaluate(scores, worker.data.held_out.labels, CLASSES).values
    place = list(result.per_client["client"]).index("site-b")
    for here, there in (("macro_auc", "auc"), ("map", "map"), ("macro_f1", "macro_f1")):
        assert found[here] == pytest.approx(result.per_client[there][place], abs=1e-6)
    assert [what for what in done if what[2] == "training your local model"] == [
        (number, 3, "training your local model") for number in (1, 2, 3)
    ]
    assert not [path for path in worker.site.state_dir.iterdir() if path.name.startswith("tmp")]


def test_fallback_method_is_named_if_the_method_needs_several_clients(
    large: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = benefit_report._train_and_predict

    def refusing(data: benefit_report.Federation, *rest: object) -> np.ndarray:
        if data.experiment.method.name != "fedavg-pl":
            raise ConfigError("it needs two")
        return real(data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(benefit_report, "_train_and_predict", refusing)
    scores, instead = train_local_baseline(worker_of(large, "site-c", tmp_path), np.arange(4), lambda *what: None)
    assert instead == "'fedavg' does not work with one client (it needs two), so 'fedavg-pl' was used"
    assert scores.shape[1] == 7


def test_report_metrics_match_the_predictions(joined: SimpleNamespace) -> None:
    worker, found = joined.worker, joined.worth
    division = benefit_report.split_held_out_rows(worker)
    assert len(division.test) == len(division.tuning) == 150
    assert not set(division.test) & set(division.tuning)
    held_out = worker.data.held_out
    raw = joined.model.predict(held_out).astype(np.float64)
    labels = held_out.labels
    assert list(found.outputs) == [LOCAL, LOCAL_TUNED, FEDERATED, FEDERATED_TUNED]
    assert np.allclose(found.outputs[FEDERATED].probabilities, raw[division.test], atol=1e-7)
    best = choose_thresholds(score_histograms(raw[division.tuning], labels[division.tuning]), "f1", "platt")
    enough = ((labels[division.tuning] == 1).sum(0) >= 10) & ((labels[division.tuning] == 0).sum(0) >= 10)
    assert enough.sum() > 4
    assert np.allclose(joined.own.thresholds, np.where(enough, best.thresholds, 0.5))
    assert np.allclose(joined.own.calibration[enough], best.calibration[enough])
    assert (joined.own.calibration[~enough] == (1, 0)).all()
    columns = np.flatnonzero((labels[division.test] == 1).sum(0) >= 10)
    assert np.flatnonzero(found.comparison.enough_samples).tolist() == columns.tolist()
    for name, told in found.outputs.items():
        y, p = labels[division.test][:, columns], told.probabilities[:, columns]
        exact = {
            "ap": np.mean([average_precision_score(y[:, k], p[:, k]) for k in range(len(columns))]),
            "auc": np.mean([roc_auc_score(y[:, k], p[:, k]) for k in range(len(columns))]),
            "f1": np.mean([f1_score(y[:, k], p[:, k] > told.thresholds[columns][k]) for k in range(len(columns))]),
        }
        for metric, value in exact.items():
            assert found.comparison.average(name, metric).value == pytest.approx(100 * value, abs=1e-3), (name, metric)


def test_report_page_shows_the_results(joined: SimpleNamespace) -> None:
    page, beside = joined.file.read_text(), joined.worth.comparison
    assert joined.file.name == "site-report.html"
    assert stat.S_IMODE(joined.file.stat().st_mode) == 0o600
    for name in joined.worth.outputs:
        for metric in ("ap", "auc", "f1", "ece"):
            figure = beside.average(name, metric)
            assert f"<td>{figure.value:.1f}<span" in page
    assert joined.said[0] == describe_verdict(joined.worth)
    assert joined.said[0] in page
    assert "150 images are the test data" in page
    assert "two halves of the held-out images" in page
    assert "3 rounds with 1 pass over them" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//|@import|url\((?!#)", page)
    assert str(joined.worker.site.state_dir) not in page
    assert ".png" not in page


def test_tuned_model_is_written_next_to_the_model(joined: SimpleNamespace) -> None:
    own = load_model(joined.file.with_name("model-tuned.safetensors"))
    assert own.tuned_thresholds.tolist() == joined.own.thresholds.tolist()  # type: ignore[union-attr]
    division = benefit_report.split_held_out_rows(joined.worker)
    mine = own.predict(joined.worker.data.held_out)[division.test]
    assert np.allclose(mine, joined.worth.outputs[FEDERATED_TUNED].probabilities, atol=1e-5)


def test_split_of_the_labels_file_is_used(joined: SimpleNamespace) -> None:
    data = joined.worker.data
    first = np.arange(len(data.held_out)) < 100
    marked = SimpleNamespace(
        data=replace(data, is_validation=first), trainer=joined.worker.trainer, site=joined.worker.site
    )
    division = benefit_report.split_held_out_rows(marked)  # type: ignore[arg-type]
    assert (division.tuning.tolist(), division.test.tolist()) == (list(range(100)), list(range(100, 300)))
    assert "as your file marks them" in division.description
    marked.data = replace(data, is_validation=np.zeros(300, bool))  # one kind only
    assert "two halves" in benefit_report.split_held_out_rows(marked).description  # type: ignore[arg-type]


def test_images_of_a_patient_are_in_the_same_half(joined: SimpleNamespace) -> None:
    data, names = joined.worker.data, np.array([f"p{row // 6}" for row in range(300)])
    held_out = replace(data.held_out, patients=names)
    there = SimpleNamespace(
        data=replace(data, held_out=held_out), trainer=joined.worker.trainer, site=joined.worker.site
    )
    division = benefit_report.split_held_out_rows(there)  # type: ignore[arg-type]
    assert not set(names[division.test]) & set(names[division.tuning])
    assert abs(len(division.test) - 150) <= 6


def test_report_has_no_metrics_if_there_are_too_few_images(
    large: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is trained for a report without figures")

    monkeypatch.setattr(benefit_report, "train_local_baseline", never)
    worker = worker_of(large, "site-b", tmp_path)
    said: list[str] = []
    model_at(worker, run(large.local(**SETTINGS | {"training__rounds": 1})).weights)
    benefit_report.report_after_run(worker, said.append)
    page = (worker.site.state_dir / "site-report.html").read_text()
    assert "Your test data is too small for a comparison: no class has 10 images with it and" in page
    assert "<table" not in page
    assert not (worker.site.state_dir / "model-tuned.safetensors").exists()
    assert said[1].startswith("Your test data is too small for a comparison")


def test_report_says_why_the_local_model_could_not_be_trained(
    joined: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ClientError("The loss became nan.")

    monkeypatch.setattr(benefit_report, "train_local_baseline", fails)
    found, own = benefit_report.compare_models(joined.worker, joined.model)
    assert own is not None
    assert list(found.outputs) == [FEDERATED, FEDERATED_TUNED]
    assert found.notes[0].endswith("it could not be trained: The loss became nan.")
    page = render_site_report(found)
    assert "The federated model has an mAP of" in page
    assert "What joining changed" not in page


def test_writing_the_report_can_be_interrupted(joined: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benefit_report, "train_local_baseline", stopped)
    said: list[str] = []
    benefit_report.report_after_run(joined.worker, said.append)
    assert said[-1] == "no report: it was stopped. The model is there"


# ---- words


def made_up(gain: float, classes: int = 3, few: bool = False) -> SiteComparison:
    """Scores of the common model that are better (or worse) than the own one's by as much."""
    generator = np.random.default_rng(0)
    targets = (generator.random((200, classes)) < 0.3).astype(np.int8)
    if few:
        targets[:, 0] = 0
        targets[:5, 0] = 1
    noise = generator.random((200, classes))
    cut = np.full(classes, 0.5)
    told = {
        name: ModelOutput(np.clip(0.5 * noise + strength * targets, 0, 1), cut)
        for name, strength in (
            (LOCAL, 0.15),
            (LOCAL_TUNED, 0.15),
            (FEDERATED, 0.15 + gain),
            (FEDERATED_TUNED, 0.15 + gain),
        )
    }
    names = tuple(f"<b>{number}" for number in range(classes))
    return SiteComparison(
        site="s",
        experiment="e",
        classes=names,
        outputs=told,
        targets=targets,
        split="rows",
        comparison=PairedComparison(told, targets, 0, draws=200),
    )


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (
            0.2,
            r"The federated model is better .* in mAP is \+\d+\.\d \(95 % interval \+.* to \+.*\)\.",
        ),
        (-0.14, r"Your local model is better than the federated model .* in mAP is −\d+\.\d \(95 % .* to −.*\)\."),
        (0.0, r"Your test data shows no clear difference .* in mAP is 0\.0 \(95 % interval 0\.0 to 0\.0\)\."),
    ],
)
def test_verdict_follows_the_confidence_interval(gain: float, words: str) -> None:
    assert re.fullmatch(words, describe_verdict(made_up(gain)))


def test_small_classes_are_named_and_names_are_escaped() -> None:
    found = made_up(0.2, few=True)
    paragraphs = describe_classes(found)
    assert (
        paragraphs[-1]
        == "These classes have too few test images and are left out of the averages: <b>0 (5 with, 195 without)."
    )
    assert paragraphs[0].startswith("By average precision the federated model is better for <b>1, <b>2.")
    assert "one in 20 of these 2 intervals excludes zero by chance" in paragraphs[0]
    page = render_site_report(found)
    assert "<b>" not in page
    assert page.count("&lt;b&gt;0") == 1


def test_lower_is_better_for_the_calibration_error() -> None:
    from fedmll.reports.site_report import judge

    intervals = [(1, 2, "ap"), (1, 2, "ece"), (-2, -1, "ece"), (-1, 1, "f1")]
    verdicts = [judge(Estimate(0, low, high), metric) for low, high, metric in intervals]
    assert verdicts == ["better", "worse", "better", "undecided"]
