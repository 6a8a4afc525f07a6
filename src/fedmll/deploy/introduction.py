"""What a client tells the server about itself when it joins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmll.deploy import label_counts
from fedmll.deploy.error_codes import JoinRejected, RejectionCode
from fedmll.methods.framework.allowed_replies import MOST_SAMPLES

DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """The size and the classes of a client's data. Only the server knows it."""

    samples: int
    held_out: int
    classes: tuple[str, ...]  # that it annotates
    digest: str  # of its images and labels
    validation: int = 0  # of held_out: for thresholds only
    min_count: int = field(default=1, compare=False)  # counts of fewer images are not sent
    labels: label_counts.LabelCounts = field(default_factory=dict, compare=False)  # of its training images

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Introduction:
        """Validate an introduction as it arrived. Nothing in it is trusted.

        Raises:
            JoinRejected: a value is missing, malformed or impossible.
        """
        samples, held_out, classes = values.get("samples"), values.get("held_out"), values.get("classes")
        digest = values.get("digest")
        if type(samples) is not int or type(held_out) is not int:  # nor true and false, which are numbers to Python
            raise _rejected("it does not say correctly what data it has")
        if not 0 <= samples <= MOST_SAMPLES or not 0 <= held_out <= MOST_SAMPLES or not samples + held_out:
            raise _rejected(f"it claims {samples} training images and {held_out} held-out images, which is impossible")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise _rejected("it does not say correctly what data it has")
        # a site that annotates nothing does not join: a method that needs labels could neither start nor resume with it
        if not classes or len(set(classes)) < len(classes):
            raise _rejected("it does not say correctly what data it has")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise _rejected("it does not say correctly what data it has")
        validation, min_count = values.get("validation", 0), values.get("min_count", 1)
        if type(validation) is not int or not 0 <= validation <= max(held_out - 1, 0):
            raise _rejected("it does not say correctly which of its images are held out")
        labels = label_counts.parse_counts(
            values.get("labels") or label_counts.withheld_counts(classes), classes, samples
        )
        if type(min_count) is not int or min_count < 1 or labels is None:
            raise _rejected("it does not say correctly how many of its images have each class")
        return cls(
            samples=samples,
            held_out=held_out,
            classes=tuple(classes),
            digest=digest,
            validation=validation,
            min_count=min_count,
            labels=labels,
        )


def _rejected(text: str) -> JoinRejected:
    return JoinRejected(RejectionCode.INTRODUCTION, text)
