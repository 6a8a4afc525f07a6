"""The run's model goes to everybody who was in it."""

from __future__ import annotations

from collections.abc import Sequence

from fedmll.client import Peer
from fedmll.deploy.flower.post import Post
from fedmll.deploy.flower.site_app import MODEL
from fedmll.deploy.handing import Handed, Own, not_given
from fedmll.engines.learner import Learner
from fedmll.running.model import SavedModel


def hand_over(post: Post, learner: Learner, peers: Sequence[Peer], model: SavedModel, own: Own) -> None:
    """With thresholds and calibration of its own where `own` has some for a site. Who did not get it is named."""
    handed, roster = Handed(learner, model, own), post.roster
    roster.update()
    here, seconds = [peer for peer in peers if peer.name in roster.members], handed.seconds(post.round_timeout)
    got = {peer.name for peer, *_ in post.exchange(MODEL, here, handed.letter, 0, seconds)}
    missing = [name for name in roster.everybody if name not in got]
    if missing:
        roster.notice(not_given(missing, model.file, learner.method.private))
