"""What can be seen inside a row's model, as pictures; thumbnails of the data only on request."""

from __future__ import annotations

from fedmll.analysis import mistakes
from fedmll.analysis.gallery import gallery
from fedmll.analysis.opened import data_of
from fedmll.analysis.picture import Picture
from fedmll.errors import FedmllError
from fedmll.report.runs import Run
from fedmll.running.saved import SavedRun, load_run

TOP = 6  # mistakes a class


def inside(run: Run, images: bool) -> list[Picture]:
    """Of one finished run. Why a picture is not there is said among what is damaged. No plug-in that a folder names is
    executed: of such a run nothing is shown that needs its code."""
    try:
        saved = load_run(run.folder, plugins=())
        data = data_of(saved) if images else None
    except FedmllError as error:
        run.damaged.append(f"its images are not shown: {error}")
        saved, data = load_run(run.folder, plugins=()), None
    found: list[Picture] = []
    try:
        found += gallery(saved, data)
        if data is not None and len(data.sample_shape) == 3:
            found.append(_mistakes(saved))
    except FedmllError as error:
        run.damaged.append(f"its model is not looked into: {error}")
    return found


def _mistakes(saved: SavedRun) -> Picture:
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
