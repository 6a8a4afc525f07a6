"""The status page in a real browser: light and dark, narrow and wide; a client's words stay words."""

from __future__ import annotations

from typing import Any

import pytest

from fedmll.config.experiment import Experiment
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.status import RunStatus, serve_status_page

pytestmark = pytest.mark.slow


def a_status() -> RunStatus:
    names = ("hospital-a", "hospital-b", "hospital-c", "hospital-d")
    status = RunStatus(
        Experiment.make({"method": {"name": "fedavg"}, "training": {"rounds": 40}}), ServerSettings(clients=names)
    )
    for name, images in zip(names[:3], (5200, 1800, 990), strict=True):
        status.record("joined", {"client": name, "images": images})
        status.record("sent", {"client": name, "bytes": 91_000_000, "round": 13, "late": False})
        status.record("reply", {"client": name, "bytes": 91_000_000, "round": 13, "late": False})
    text = "round 13: the reply of hospital-b is rejected: <script>document.title = 'run'</script> " + "x" * 200
    status.record("rejected", {"client": "hospital-b", "text": text})
    status.record("disconnected", {"client": "hospital-b", "text": text})
    status.record("excluded", {"client": "hospital-c"})
    status.on_run_start(status.experiment, None, 1)  # type: ignore[arg-type]
    for number in range(1, 14):
        status.on_round_end({"round": number, "seconds": 61.0})
    status.on_client_end(14, 1, 3)
    return status


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_page_is_readable(browser: Any, width: int, dark: bool, tmp_path: Any) -> None:
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": scheme})
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    status = a_status()
    with serve_status_page("127.0.0.1:0", status) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        browser.save_screenshot(str(tmp_path / "page.png"))
        text = browser.execute_script("return document.body.innerText")
        # the only complaint: there is no favicon
        assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []
        assert browser.title == "13 of 40 rounds · fedmll"  # the script is words
        assert "<script>document.title" in text
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background.removeprefix("rgb(").rstrip(")").split(","))) < 200) == dark
        words = ("14 of 40", "about 27 min", "connected", "disconnected", "excluded", "not joined yet", "91.0 MB")
        assert not [word for word in words if word not in text]
