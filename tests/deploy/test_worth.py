"""Was it worth joining: a site's own model beside the common one, and the page that says so."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sites import CLASSES, Consortium, write_consortium
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fedmll import run
from fedmll.deploy import alone, serving, worth
from fedmll.deploy.alone import trained_alone
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import Setup, SiteWorker
from fedmll.errors import ClientError, ConfigError
from fedmll.evaluation import metrics
from fedmll.evaluation.beside import Beside, Figure, Told
from fedmll.evaluation.histograms import histograms
from fedmll.report.site_page import ALONE, ALONE_OWN, COMMON, COMMON_OWN, Worth, by_class_words, site_page, verdict
from fedmll.running.model import SavedModel, describe, load_model, write_model
from fedmll.running.thresholds import choose

SETTINGS = {"partition__holdout": 0.6, "training__rounds": 3, "training__lr": 0.01}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Enough held-out images at site-a for ten of most digits in each half."""
    patch = pytest.MonkeyPatch()
    patch.setattr("sites.SIZES", {"site-a": 500, "site-b": 60, "site-c": 60, "test": 60})
    made = write_consortium(tmp_path_factory.mktemp("consortium"), with_keys=False)
    patch.undo()
    return made


def worker_of(large: Consortium, name: str, memory: Path, **changes: object) -> SiteWorker:
    experiment = serving.settled(large.server(**SETTINGS | changes), (1, 8, 8))
    setup = Setup("run1", serving.told(experiment), tuple(CLASSES), (1, 8, 8), 3)
    home = large.folder
    site = Site(name, home / name / "labels.csv", home / "images", memory / name, device="cpu")
    return SiteWorker(site, setup, lambda text: None)


def model_at(worker: SiteWorker, weights: dict) -> SavedModel:
    file = worker.site.memory / "model.safetensors"
    described = describe(worker.learner.task.experiment, worker.learner, None, 3)
    write_model(file, weights | worker.learner.frozen(), described)
    return load_model(file)


@pytest.fixture(scope="module")
def joined(large: Consortium, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    result = run(large.local(**SETTINGS))
    worker = worker_of(large, "site-a", tmp_path_factory.mktemp("joined"))
    model, said = model_at(worker, result.weights), list[str]()
    file = worth.write_site_report(worker, model, said.append)
    found, own = worth.found_out(worker, model)
    return SimpleNamespace(worker=worker, model=model, said=said, file=file, worth=found, own=own)


def test_the_own_model_is_what_local_only_gives(large: Consortium, tmp_path: Path) -> None:
    """One client's federation is the client alone: the same figures as the method local-only of a simulation."""
    changes = {"partition__holdout": 0.3, "method__name": "fedavg-pl"}
    result = run(large.local(**SETTINGS | changes | {"method__name": "local-only"}))
    worker = worker_of(large, "site-b", tmp_path, **changes)
    done: list[tuple[int, int, str]] = []
    scores, instead = trained_alone(worker, np.arange(4), lambda *what: done.append(what))
    assert instead is None
    found = metrics.evaluate(scores, worker.data.held_out.labels, CLASSES).values
    place = list(result.per_client["client"]).index("site-b")
    for here, there in (("macro_auc", "auc"), ("map", "map"), ("macro_f1", "macro_f1")):
        assert found[here] == pytest.approx(result.per_client[there][place], abs=1e-6)
    assert [what for what in done if what[2] == "training your own model"] == [
        (number, 3, "training your own model") for number in (1, 2, 3)
    ]
    assert not [path for path in worker.site.memory.iterdir() if path.name.startswith("tmp")]


def test_where_the_method_needs_others_it_is_said(
    large: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = alone._predicted

    def refusing(data: alone.Federation, *rest: object) -> np.ndarray:
        if data.experiment.method.name != "fedavg-pl":
            raise ConfigError("it needs two")
        return real(data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(alone, "_predicted", refusing)
    scores, instead = trained_alone(worker_of(large, "site-c", tmp_path), np.arange(4), lambda *what: None)
    assert instead == "'fedavg' does not work with one client (it needs two), so it is 'fedavg-pl' here"
    assert scores.shape[1] == 7


def test_the_figures_are_those_of_the_predictions(joined: SimpleNamespace) -> None:
    worker, found = joined.worker, joined.worth
    division = worth.divided(worker)
    assert len(division.test) == len(division.tuning) == 150
    assert not set(division.test) & set(division.tuning)
    held_out = worker.data.held_out
    raw = joined.model.predict(held_out).astype(np.float64)
    labels = held_out.labels
    assert list(found.told) == [ALONE, ALONE_OWN, COMMON, COMMON_OWN]
    assert np.allclose(found.told[COMMON].probabilities, raw[division.test], atol=1e-7)
    best = choose(histograms(raw[division.tuning], labels[division.tuning]), "f1", "platt")
    enough = ((labels[division.tuning] == 1).sum(0) >= 10) & ((labels[division.tuning] == 0).sum(0) >= 10)
    assert enough.sum() > 4
    assert np.allclose(joined.own.thresholds, np.where(enough, best.thresholds, 0.5))
    assert np.allclose(joined.own.by[enough], best.by[enough])
    assert (joined.own.by[~enough] == (1, 0)).all()
    columns = np.flatnonzero((labels[division.test] == 1).sum(0) >= 10)
    assert np.flatnonzero(found.beside.enough).tolist() == columns.tolist()
    for name, told in found.told.items():
        y, p = labels[division.test][:, columns], told.probabilities[:, columns]
        exact = {
            "map": np.mean([average_precision_score(y[:, k], p[:, k]) for k in range(len(columns))]),
            "auc": np.mean([roc_auc_score(y[:, k], p[:, k]) for k in range(len(columns))]),
            "f1": np.mean([f1_score(y[:, k], p[:, k] > told.thresholds[columns][k]) for k in range(len(columns))]),
        }
        for metric, value in exact.items():
            assert found.beside.average(name, metric).value == pytest.approx(100 * value, abs=1e-3), (name, metric)


def test_the_page_says_what_was_found(joined: SimpleNamespace) -> None:
    page, beside = joined.file.read_text(), joined.worth.beside
    assert joined.file.name == "site-report.html"
    assert stat.S_IMODE(joined.file.stat().st_mode) == 0o600
    for name in joined.worth.told:
        for metric in ("map", "auc", "f1", "ece"):
            figure = beside.average(name, metric)
            assert f"<td>{figure.value:.1f}<span" in page
    assert joined.said[0] == verdict(joined.worth)
    assert joined.said[0] in page
    assert "150 images are the test data" in page
    assert "two halves of what was held out" in page
    assert "3 rounds of 1 × over them" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//|@import|url\((?!#)", page)
    assert str(joined.worker.site.memory) not in page
    assert ".png" not in page


def test_the_model_with_own_thresholds_is_beside_it(joined: SimpleNamespace) -> None:
    own = load_model(joined.file.with_name("model-own.safetensors"))
    assert own.tuned_thresholds.tolist() == joined.own.thresholds.tolist()  # type: ignore[union-attr]
    division = worth.divided(joined.worker)
    mine = own.predict(joined.worker.data.held_out)[division.test]
    assert np.allclose(mine, joined.worth.told[COMMON_OWN].probabilities, atol=1e-5)


def test_rows_that_the_file_marks_are_used_as_they_are(joined: SimpleNamespace) -> None:
    data = joined.worker.data
    first = np.arange(len(data.held_out)) < 100
    marked = SimpleNamespace(
        data=replace(data, validation=first), learner=joined.worker.learner, site=joined.worker.site
    )
    division = worth.divided(marked)  # type: ignore[arg-type]
    assert (division.tuning.tolist(), division.test.tolist()) == (list(range(100)), list(range(100, 300)))
    assert "as your file marks them" in division.words
    marked.data = replace(data, validation=np.zeros(300, bool))  # one kind only
    assert "two halves" in worth.divided(marked).words  # type: ignore[arg-type]


def test_patients_are_in_one_half(joined: SimpleNamespace) -> None:
    data, names = joined.worker.data, np.array([f"p{row // 6}" for row in range(300)])
    held_out = replace(data.held_out, patients=names)
    there = SimpleNamespace(
        data=replace(data, held_out=held_out), learner=joined.worker.learner, site=joined.worker.site
    )
    division = worth.divided(there)  # type: ignore[arg-type]
    assert not set(names[division.test]) & set(names[division.tuning])
    assert abs(len(division.test) - 150) <= 6


def test_too_few_rows_get_words_and_no_figures(
    large: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is trained for a report without figures")

    monkeypatch.setattr(worth, "trained_alone", never)
    worker = worker_of(large, "site-b", tmp_path)
    said: list[str] = []
    model_at(worker, run(large.local(**SETTINGS | {"training__rounds": 1})).weights)
    worth.report_at_the_end(worker, said.append)
    page = (worker.site.memory / "site-report.html").read_text()
    assert "Your test data is too small to say: no class has 10 images with it and 10 without it among the 18" in page
    assert "<table" not in page
    assert not (worker.site.memory / "model-own.safetensors").exists()
    assert said[1].startswith("Your test data is too small to say")


def test_an_own_model_that_cannot_be_trained_is_said(joined: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ClientError("The loss became nan.")

    monkeypatch.setattr(worth, "trained_alone", fails)
    found, own = worth.found_out(joined.worker, joined.model)
    assert own is not None
    assert list(found.told) == [COMMON, COMMON_OWN]
    assert found.notes[0].endswith("it could not be trained: The loss became nan.")
    page = site_page(found)
    assert "On your test data the common model has an mAP of" in page
    assert "What joining changed" not in page


def test_it_can_be_stopped(joined: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worth, "trained_alone", stopped)
    said: list[str] = []
    worth.report_at_the_end(joined.worker, said.append)
    assert said[-1] == "no report: it was stopped; the model is there"


# ---- words


def made_up(gain: float, classes: int = 3, few: bool = False) -> Worth:
    """Scores of the common model that are better (or worse) than the own one's by as much."""
    generator = np.random.default_rng(0)
    targets = (generator.random((200, classes)) < 0.3).astype(np.int8)
    if few:
        targets[:, 0] = 0
        targets[:5, 0] = 1
    noise = generator.random((200, classes))
    cut = np.full(classes, 0.5)
    told = {
        name: Told(np.clip(0.5 * noise + strength * targets, 0, 1), cut)
        for name, strength in ((ALONE, 0.15), (ALONE_OWN, 0.15), (COMMON, 0.15 + gain), (COMMON_OWN, 0.15 + gain))
    }
    names = tuple(f"<b>{number}" for number in range(classes))
    return Worth("s", "e", names, told, targets, "rows", beside=Beside(told, targets, 0, draws=200))


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.2, r"The common model is better on your test data: mAP \+\d+\.\d \(95 % interval \+.* to \+.*\)\."),
        (-0.14, r"Your own model is better on your test data than the common one: mAP −\d+\.\d \(95 % .* to −.*\)\."),
        (0.0, r"The common model and your own cannot be told apart .*: mAP 0\.0 \(95 % interval 0\.0 to 0\.0\)\."),
    ],
)
def test_the_verdict_claims_what_the_interval_shows(gain: float, words: str) -> None:
    assert re.fullmatch(words, verdict(made_up(gain)))


def test_small_classes_are_named_and_names_are_escaped() -> None:
    found = made_up(0.2, few=True)
    paragraphs = by_class_words(found)
    assert paragraphs[-1] == "Too few test images to say (and in no average): <b>0 (5 with, 195 without)."
    assert paragraphs[0].startswith("By average precision the common model is better for <b>1, <b>2.")
    assert "one in 20 lies on one side of zero by chance" in paragraphs[0]
    page = site_page(found)
    assert "<b>" not in page
    assert page.count("&lt;b&gt;0") == 1


def test_lower_is_better_for_the_calibration_error() -> None:
    from fedmll.report.site_page import judged

    judge: Callable[[float, float, str], str] = lambda low, high, metric: judged(Figure(0, low, high), metric)  # noqa: E731
    assert [judge(1, 2, "map"), judge(1, 2, "ece"), judge(-2, -1, "ece"), judge(-1, 1, "f1")] == [
        "better", "worse", "better", "open",
    ]  # fmt: skip
