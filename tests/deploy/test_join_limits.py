"""A server asks a site for the same round again and again, or for endless training: the site's own limits hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from fake_grid import FakeGrid, consortium, drive, fast_polling, make_grid  # noqa: F401 (fixtures)
from flwr.app import Message as FlowerMessage

from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.deploy.flower.client_app import EVALUATE, TRAIN
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.site.approval import MAX_REPEATS, SetupRecord
from fedmll.deploy.site.site_config import SiteLimits, read_site_file, write_site_file


def ask_again(grid: FakeGrid, kind: str, times: int) -> list[Any]:
    """Send a site the first message of this kind so many times; the error codes of its replies, or None."""
    (node,) = [node for node in grid.nodes if node.name == "site-a"]
    first = next(
        message
        for message in grid.sent
        if message.metadata.message_type == kind and message.metadata.dst_node_id == node.node_id
    )
    codes = []
    for _ in range(times):
        (key,) = grid.push_messages([FlowerMessage(first.content, node.node_id, kind, ttl=60)])
        (reply,) = grid.pull_messages([key])
        codes.append(from_records(reply.content)[1].get("error"))
    return codes


@pytest.mark.parametrize("kind", [TRAIN, EVALUATE])
def test_a_round_is_trained_and_tested_a_limited_number_of_times(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", training__rounds=3, partition__holdout=0.2)
    codes = ask_again(grid, kind, 25)
    assert codes == [None] * (MAX_REPEATS - 1) + [SiteErrorCode.LIMITS] * (26 - MAX_REPEATS)
    assert f"has asked for round 1 ({kind}) {MAX_REPEATS} times already" in capsys.readouterr().out
    grid.join_again()
    assert ask_again(grid, kind, 1) == [None]  # a person has joined again


def test_time_of_a_join_is_limited(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", training__rounds=1, partition__holdout=0.2)
    for node in grid.nodes:
        here = read_site_file(node.site_file)
        write_site_file(replace(here, limits=replace(here.limits, max_hours=1e-9)), node.site_file)
    assert ask_again(grid, TRAIN, 2) == [None, SiteErrorCode.LIMITS]
    with pytest.raises(SiteError, match=r"trained and tested for 2.0 hours, and you allow 1.5 \(--max-hours\)"):
        SetupRecord({}, seconds=7200).begin_work(TRAIN, 1, max_hours=1.5)


def test_endless_local_training_is_rejected(consortium: Consortium) -> None:  # noqa: F811
    limits = SiteLimits()
    limits.check_settings(consortium.server(training__local_epochs=100))
    with pytest.raises(SiteError, match=r"1000000000 epochs per round, and you allow 100 \(--max-epochs\)"):
        limits.check_settings(consortium.server(training__local_epochs=10**9))
