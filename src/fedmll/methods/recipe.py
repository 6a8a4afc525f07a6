"""The list that a method is: which head, which parts, and whether they can work together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedmll import registry
from fedmll.errors import ConfigError
from fedmll.methods import losses
from fedmll.methods.contract import Head, Part, Piece, option
from fedmll.settings import Training

JOBS = {
    "targets": "how targets are taught",
    "unknown": "how unknown targets are taught",
    "views": "which views the network sees",
    "average": "how the weights are averaged",
}
STEP_HOOKS = ("narrow", "shape", "term", "adjust", "stepped", "inputs")  # what a part does in a client's steps


@dataclass(frozen=True)
class Choice:
    """An option of a method that says which part it has, or none: the switches of an ablation."""

    option: str
    parts: Mapping[Any, type[Part] | None]
    meaning: str

    @property
    def field(self) -> tuple[Any, Any]:
        values = tuple(self.parts)
        kind = bool if isinstance(values[0], bool) else Literal[values]
        return kind, option(values[0], self.meaning)


def switch(name: str, part: type[Part], meaning: str, otherwise: type[Part] | None = None) -> Choice:
    """On by default."""
    return Choice(name, {True: part, False: otherwise}, meaning)


def stood_on(part: type[Part]) -> list[type[Part]]:
    """The part after all that it stands on."""
    return [*dict.fromkeys(deeper for needed in part.requires for deeper in stood_on(needed)), part]


def refuse_rivals(method: str, pieces: Iterable[type[Piece]]) -> None:
    """Parts may share an option that is the same; two of one name that are not would hide each other."""
    seen: dict[str, tuple[type[Piece], str]] = {}
    for piece in pieces:
        for name, field in piece.Options.model_fields.items():
            other, meaning = seen.setdefault(name, (piece, repr(field)))
            if meaning != repr(field):
                raise ConfigError(
                    f"In '{method}' both '{other.name}' and '{piece.name}' have an option '{name}', and they are not "
                    "the same. Put them together with `compose`, where each has a table of its own."
                )


@dataclass(frozen=True)
class Recipe:
    head: type[Head]
    parts: tuple[type[Part], ...]  # the average is the last

    @property
    def pieces(self) -> tuple[type[Piece], ...]:
        return (self.head, *self.parts)

    def __post_init__(self) -> None:
        for job in sorted({job for part in self.parts for job in part.jobs}):
            rivals = [part.name for part in self.parts if job in part.jobs]
            if len(rivals) > 1:
                raise ConfigError(
                    f"The parts {' and '.join(map(repr, rivals))} cannot work together: {JOBS.get(job, job)} is the "
                    "job of one part alone. Leave one of them out."
                )
        for part in self.parts:
            lacking = sorted(part.needs - self.head.gives)
            if lacking:
                able = sorted(name for name, head in registry.all_of("head").items() if part.needs <= head.gives)
                raise ConfigError(
                    f"The part '{part.name}' needs a head with {' and '.join(lacking)}, which '{self.head.name}' has "
                    f"not; with it go: {', '.join(able)}."
                )
        private = next((part.name for part in self.parts if part.private), None)
        speaks = next((part.name for part in self.parts if part.every_class), None)
        if private and speaks:
            raise ConfigError(
                f"The parts '{private}' and '{speaks}' cannot work together: with the one clients know their own "
                "classes only, with the other they speak of all. Leave one of them out."
            )
        alone = next((part.name for part in self.parts if part.alone), None)
        common = next((part.name for part in self.parts if part.common), None)
        if alone and common:
            raise ConfigError(
                f"The parts '{alone}' and '{common}' cannot work together: with the one every client has a model of "
                "its own, the other needs a common one. Leave one of them out."
            )
        if not any("targets" in part.jobs for part in self.parts):
            able = sorted(name for name, part in registry.all_of("part").items() if "targets" in part.jobs)
            raise ConfigError(f"No part says how targets are taught; add one of {', '.join(able)}.")

    def check(self, training: Training) -> None:
        """Refuse (ConfigError) settings of training that its parts cannot work with."""
        self._check_loss(training)
        if training.together is not None:
            self._check_together(training)

    def _check_loss(self, training: Training) -> None:
        """Its parts may leave `training.loss` out, or teach otherwise."""
        teacher = next(part for part in self.parts if "targets" in part.jobs)
        setting = f"training.loss = '{training.loss}'"
        if training.loss != "bce" and teacher.losses == "own":
            raise ConfigError(f"{setting} would change nothing: the part '{teacher.name}' has its own. Leave it out.")
        if not losses.for_missing(training.loss):
            return
        other = teacher if teacher.losses == "known" else next((p for p in self.parts if "unknown" in p.jobs), None)
        if other is not None:
            raise ConfigError(
                f"{setting} says what unknown targets teach, and the part '{other.name}' says otherwise; they cannot "
                "work together. Use another loss (bce, weighted, asl), or a method without that part, fedavg say."
            )
        if training.loss == "splc" and training.rounds == 1:
            raise ConfigError(f"{setting} finds missing labels from round 2 on; training.rounds is 1. Raise it.")

    def _check_together(self, training: Training) -> None:
        """A part may be able to work for one client at a time only."""
        setting = f"training.together = {training.together}"
        if training.optimizer_state == "kept":
            raise ConfigError(f"{setting} needs training.optimizer_state = 'fresh'; leave one of them out.")
        single = next(iter(self.single), None)
        if single is not None:
            methods = registry.all_of("method").items()
            able = [name for name, m in methods if not m.pooled and not m.recipe(m.Options()).single]
            raise ConfigError(
                f"{setting}: the part '{single}' works for one client at a time. Leave the setting out, or use a "
                f"method without that part; can be trained together: {', '.join(sorted(able))}."
            )

    @property
    def single(self) -> list[str]:
        """The parts that work for one client at a time: what they do in a step is not marked `together`."""

        def marked(part: type[Part]) -> bool:
            own = (getattr(part, hook) for hook in STEP_HOOKS if getattr(part, hook) is not getattr(Part, hook))
            return all(getattr(hook, "together", False) for hook in own)

        return [part.name for part in self.parts if not marked(part)]

    @classmethod
    def of(cls, head: type[Head], parts: Iterable[type[Part]], average: type[Part]) -> Recipe:
        """With the parts that others stand on, each before the first that needs it."""
        listed, found = [*parts, average], list[type[Part]]()
        for part in listed:
            if listed.count(part) > 1:
                raise ConfigError(f"The part '{part.name}' is in the method twice.")
            found += [needed for needed in stood_on(part) if needed not in found]
        return cls(head, tuple(found))
