"""The site report in headless Chromium: everything is visible, light and dark, on a wide and on a narrow screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import open_page

from fedmll.evaluation.bootstrap import ModelOutput, PairedComparison
from fedmll.reports.site_report import (
    FEDERATED,
    FEDERATED_TUNED,
    LOCAL,
    LOCAL_TUNED,
    SiteComparison,
    render_site_report,
)

pytestmark = pytest.mark.slow
CLASSES = ("Atelectasis", "Effusion", "A finding with quite a long name, as some have it", "Nodule", "Rare")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator = np.random.default_rng(3)
    targets = (generator.random((300, 5)) < [0.4, 0.2, 0.3, 0.1, 0.01]).astype(np.int8)
    noise, gain = generator.random((2, 300, 5)), np.array([0.25, -0.1, 0.05, 0.0, 0.1])
    scores = np.clip([0.6 * noise[0] + 0.15 * targets, 0.6 * noise[1] + (0.15 + gain) * targets], 0, 1)
    thresholds = np.full(5, 0.5), np.full(5, 0.4)
    outputs = {LOCAL: ModelOutput(scores[0], thresholds[0]), LOCAL_TUNED: ModelOutput(scores[0], thresholds[1])}
    outputs |= {
        FEDERATED: ModelOutput(scores[1], thresholds[0]),
        FEDERATED_TUNED: ModelOutput(scores[1], thresholds[1]),
    }
    site = SiteComparison(
        site="hospital-a",
        experiment="fedavg",
        classes=CLASSES,
        outputs=outputs,
        targets=targets,
        split="How the samples were split.",
        notes=["A note."],
        comparison=PairedComparison(outputs, targets, 1),
    )
    file: Path = tmp_path_factory.mktemp("site") / "site-report.html"
    file.write_text(render_site_report(site))
    return file.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_every_section_is_visible(browser: Any, page: str, width: int, dark: bool) -> None:
    open_page(browser, page, width, dark)
    assert browser.get_log("browser") == []
    across, inner = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across <= inner, "the page itself does not scroll sideways"
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    boxes = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect().toJSON())"
    tiles = browser.execute_script(boxes, ".tile")
    assert len(tiles) == 4
    assert all(box["width"] > 100 and box["right"] <= inner for box in tiles)
    (chart,) = browser.execute_script(boxes, "figure[data-chart=calibration] .plot svg")
    assert chart["width"] > 200 and chart["height"] > 60
    assert len(browser.execute_script(boxes, "section#models tbody tr")) == 4


def test_bars_agree_with_the_numbers(browser: Any, page: str) -> None:
    open_page(browser, page)
    found = browser.execute_script(
        "return [...document.querySelectorAll('section#classes > .scroll tbody tr')].map((row) => {"
        "  const at = (name) => { const box = row.querySelector(name).getBoundingClientRect();"
        "    return [box.left, box.right, (box.left + box.right) / 2, box.top]; };"
        "  return [row.className, row.querySelector('.gap').textContent, at('.zero'), at('.span'), at('.dot')]; })"
    )
    assert len(found) == 4  # the rare class has no line
    assert {side for side, *_ in found} >= {"better", "worse"}
    for side, gap, zero, span, dot in found:
        assert span[0] - 1 <= dot[2] <= span[1] + 1
        assert (span[0] > zero[2]) == (side == "better")
        assert (span[1] < zero[2]) == (side == "worse")
        assert (dot[2] > zero[2]) == gap.startswith("+")


def test_the_theme_and_the_other_tables(browser: Any, page: str) -> None:
    open_page(browser, page)
    browser.find_element("id", "theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert len(browser.find_elements("css selector", "section#classes table")) == 4
    assert browser.get_log("browser") == []
