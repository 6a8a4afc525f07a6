"""What a client says of itself when it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmll.deploy import label_counts
from fedmll.errors import ReplyRefused
from fedmll.methods.expected import MOST_SAMPLES

DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Introduction:
    """For the server only."""

    samples: int
    held_out: int
    classes: tuple[str, ...]  # that it annotates
    digest: str  # of its images and labels
    validation: int = 0  # of held_out: for thresholds only
    min_count: int = field(default=1, compare=False)  # counts of fewer images are not sent
    labels: label_counts.Counts = field(default_factory=dict, compare=False)  # of its training images

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Introduction:
        samples, held_out, classes = told.get("samples"), told.get("held_out"), told.get("classes")
        digest = told.get("digest")
        if type(samples) is not int or type(held_out) is not int:  # nor true and false, which are numbers to Python
            raise ReplyRefused("it does not say properly what data it has")
        if not 0 <= samples <= MOST_SAMPLES or not 0 <= held_out <= MOST_SAMPLES or not samples + held_out:
            raise ReplyRefused(f"it says that it has {samples} images and holds {held_out} out, which is not believed")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ReplyRefused("it does not say properly what data it has")
        # a site that annotates nothing does not come; a method that needs labels would not start with it, nor resume
        if not classes or len(set(classes)) < len(classes):
            raise ReplyRefused("it does not say properly what data it has")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise ReplyRefused("it does not say properly what data it has")
        validation, smallest = told.get("validation", 0), told.get("min_count", 1)
        if type(validation) is not int or not 0 <= validation <= max(held_out - 1, 0):
            raise ReplyRefused("it does not say properly which of its images are held out")
        counts = label_counts.believed(told.get("labels") or label_counts.nothing_said(classes), classes, samples)
        if type(smallest) is not int or smallest < 1 or counts is None:
            raise ReplyRefused("it does not say properly how many of its images have a class")
        return cls(samples, held_out, tuple(classes), digest, validation, smallest, counts)
