"""The HTML report in headless Chromium: no errors, every chart visible, light and dark, narrow and wide; controls
work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from report_runs import comparison, open_page

from fedmll.reports import html_report
from fedmll.reports.figure import ReportFigure

__all__ = ["comparison"]

pytestmark = pytest.mark.slow
CHARTS = {"curves", "classes", "clients", "gain", "calibration", "thresholds"}


@pytest.fixture(scope="module")
def page(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1], [1, 0])
    figures = [ReportFigure(name="line", title="A line", caption="A line.", figure=figure)]
    file = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_report, "run_figures", lambda run, images: figures)
        html_report.write_report([comparison], file)
    return file.as_uri()


def series(browser: Any, chart: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(`figure[data-chart=${arguments[0]}] g[data-series]`)]"
        ".map((group) => group.dataset.series)", chart
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_every_chart_is_visible(browser: Any, page: str, width: int, dark: bool) -> None:
    begin = time.monotonic()
    open_page(browser, page, width, dark)
    seconds = (
        browser.execute_script("return performance.timing.loadEventEnd - performance.timing.navigationStart") / 1000
    )
    assert seconds < 3, f"{time.monotonic() - begin:.1f} s with the browser's own work"
    assert browser.get_log("browser") == []
    found = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map((figure) => {"
        "  const drawn = figure.querySelector('.plot svg, img'), box = drawn.getBoundingClientRect();"
        "  return [figure.dataset.chart || 'model', box.width, box.height, drawn.querySelectorAll('*').length];"
        "})"
    )
    assert {name for name, *_ in found} == CHARTS | {"model"}
    for name, wide, high, parts in found:
        assert wide > 200 and high > 60 and (name == "model" or parts > 10), name
    across, inner = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across <= inner, "the page itself does not scroll sideways"
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")


def click(browser: Any, within: Any, selector: str) -> None:
    """Click an element in the middle of the window: the fixed bar at the top covers no element there."""
    element = within.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def test_choosing_a_metric_an_axis_and_a_row(browser: Any, page: str) -> None:
    open_page(browser, page)
    curves = browser.find_element("css selector", "figure[data-chart=curves]")
    title = "return document.querySelector('figure[data-chart=curves] svg title').textContent"
    assert browser.execute_script(title) == "Learning curves: macro AUC, % by round"
    click(browser, curves, "select option[value='1']")
    click(browser, curves, ".choice button:nth-child(3)")
    assert browser.execute_script(title) == "Learning curves: mAP, % by seconds on this machine"
    assert series(browser, "curves") == ["local-only", "fedprox:mu=0.1"]
    click(browser, browser, "tr[data-row='1'] input")
    assert series(browser, "curves") == ["local-only"] and series(browser, "thresholds") == []
    click(browser, curves, ".legend button[data-row='1']")
    assert series(browser, "curves") == ["local-only", "fedprox:mu=0.1"]
    assert browser.find_element("css selector", "tr[data-row='1'] input").is_selected()
    assert browser.get_log("browser") == []


def test_the_table_can_be_sorted_and_shows_all_metrics(browser: Any, page: str) -> None:
    open_page(browser, page)
    heading = browser.find_element("css selector", "table.results thead th:nth-child(2) button")
    cells = "document.querySelectorAll('table.results tbody td:nth-child(2)')"
    values = f"return [...{cells}].map((cell) => Number(cell.dataset.value))"
    for reverse in (True, False):
        heading.click()
        found = browser.execute_script(values)
        assert found == sorted(found, reverse=reverse)
    count = "return [...document.querySelectorAll('table.results thead th')].filter((cell) => cell.offsetWidth).length"
    before = browser.execute_script(count)
    browser.find_element("id", "all-metrics").click()
    assert browser.execute_script(count) > before


def test_the_theme_button_and_the_tooltips(browser: Any, page: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, page)
    browser.find_element("id", "theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    for chart, words in (("curves", "round: "), ("clients", "c00")):
        plot = browser.find_element("css selector", f"figure[data-chart={chart}] .plot svg")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
        ActionChains(browser).move_to_element(plot).perform()
        tip = browser.find_element("css selector", ".tip")
        assert tip.is_displayed() and words in tip.text
    details = browser.find_element("css selector", "figure[data-chart=classes] .numbers summary")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", details)
    details.click()
    rows = "figure[data-chart=classes] .numbers tbody tr"  # they are written when the browser reports the opening
    WebDriverWait(browser, 20).until(lambda browser: len(browser.find_elements("css selector", rows)) == 20)
