"""What can be seen inside a row's model, as pictures; thumbnails of the data only on request."""

from __future__ import annotations

from fedmll.analysis import mistakes
from fedmll.analysis.picture import Picture
from fedmll.errors import FedmllError
from fedmll.report.runs import Run
from fedmll.running.saved import load_run

TOP = 6  # mistakes a class


def inside(run: Run, images: bool) -> list[Picture]:
    """Of one finished run. Why a picture is not there is said among what is damaged."""
    found: list[Picture] = []
    if images:
        try:
            found.append(_mistakes(run))
        except FedmllError as error:
            run.damaged.append(f"its images are not shown: {error}")
    return found


def _mistakes(run: Run) -> Picture:
    saved = load_run(run.folder)
    kept = saved.predictions()
    wrong = mistakes.mistakes(kept, TOP)
    rows = [
        {"class": name, "truth": int(one.present), "probability": one.probability, "sample": kept.name(one.sample)}
        for name, ones in wrong.items()
        for one in ones
    ]
    words = f"Up to {TOP} a class: farthest on the wrong side of 0.5, with the truth and the probability."
    figure = mistakes.sheet(kept, wrong, mistakes.images_of(saved))
    return Picture("mistakes", "The most confident mistakes on the test data", words, figure, rows)
