"""`Experiment`: everything that defines a run, validated before anything starts; read from TOML, written as TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BeforeValidator, Field, PrivateAttr

from fedmll.config.resolve import resolve
from fedmll.config.settings import (
    AUTO,
    AnnotationSettings,
    DataSettings,
    EngineSettings,
    MethodSettings,
    ModelSettings,
    ParticipationSettings,
    PartitionSettings,
    SettingsSection,
    SiteSettings,
    StudySettings,
    TrainingSettings,
)
from fedmll.config.toml_values import flatten, merge_overrides, read_toml, validate
from fedmll.core import registry


def _absolute_unique(files: Any) -> Any:
    if not isinstance(files, list | tuple) or not all(isinstance(file, str | Path) for file in files):
        return files  # pydantic explains what is wrong
    return tuple(dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files))


def _list_of_sites(sites: Any) -> Any:
    if isinstance(sites, Mapping) and not {"name", "data"} & sites.keys():
        raise ValueError("[sites] is called [study] now; [[sites]] lists sites with data of their own")
    return (sites,) if isinstance(sites, Mapping) else sites


class Experiment(SettingsSection):
    """All settings that a result depends on. `Experiment()` has the defaults.

    `Experiment(...)` only validates. `make`, `load` and `changed` also import plug-in files and resolve the experiment
    (`fedmll.config.resolve`); `run` and `compare` do so for experiments that are not resolved yet.
    """

    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="The seed of all random draws.")
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    annotation: AnnotationSettings = AnnotationSettings()
    model: ModelSettings = ModelSettings()
    method: MethodSettings = MethodSettings()
    training: TrainingSettings = TrainingSettings()
    participation: ParticipationSettings = ParticipationSettings()
    engine: EngineSettings = EngineSettings()
    study: StudySettings | None = None
    sites: Annotated[tuple[SiteSettings, ...], BeforeValidator(_list_of_sites), Field(min_length=1)] | None = None
    plugins: Annotated[tuple[str, ...], BeforeValidator(_absolute_unique)] = Field(
        default=(),
        description="Plug-in files (--plugin). Plug-ins of installed packages are found without being named.",
    )

    _requested: dict[str, Any] | None = PrivateAttr(default=None)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and self.model_dump() == other.model_dump()

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about settings that were decided by a rule."""
        return self._notes

    @property
    def is_resolved(self) -> bool:
        return self._requested is not None

    def is_set(self, key: str) -> bool:
        """Whether the user set a `section.key`. Otherwise its value is a default, or a rule decided it."""
        values: Any = _requested_values(self) if self._requested is None else self._requested
        *sections, last = key.split(".")
        for section in sections:
            values = values.get(section, {})
        return last in values

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Experiment:
        """A resolved experiment from nested values; errors name the key and the most similar valid key.

        The name alone stands for a method, its data or its backbone: `{"method": "fedprox", "data": "digits"}`.
        """
        sections = {"method": "name", "data": "name", "model": "backbone"}
        named = {
            section: {key: values[section]} for section, key in sections.items() if isinstance(values.get(section), str)
        }
        return validate(cls, {**values, **named}).prepared()

    @classmethod
    def load(cls, path: Path | str, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """A resolved experiment from a TOML file.

        Args:
            path: the file.
            overrides: `section.key` → value, applied on top of the file.
        """
        return cls.make(merge_overrides(read_toml(Path(path)), overrides or {}))

    def prepared(self) -> Experiment:
        """Import the plug-in files and resolve the experiment; the experiment itself if it is resolved already."""
        if self.is_resolved:
            return self
        for file in self.plugins:
            registry.load_plugin_file(Path(file))
        resolved, notes = resolve(self)
        resolved._requested, resolved._notes = _requested_values(self), notes
        return resolved

    def changed(self, overrides: Mapping[str, Any]) -> Experiment:
        """A copy with other `section.key` values.

        Settings that were left open are decided again. A different method starts with its own default options.
        """
        values = dict(_requested_values(self) if self._requested is None else self._requested)
        is_bound = overrides.get("method.of") == self.method.name  # an upper bound takes the options of its method
        if overrides.get("method.name", self.method.name) != self.method.name and not is_bound:
            values["method"] = {}
        return self.make(merge_overrides(values, overrides))

    def settled(self, derived: Mapping[str, Any], notes: Iterable[str] = ()) -> Experiment:
        """A copy with the settings that the data determines (`section.key` → value), where they are still open."""
        prepared = self.prepared()
        values = prepared.model_dump(exclude_none=True)
        known = flatten(values)
        open_settings = {key: value for key, value in derived.items() if known.get(key, AUTO) == AUTO}
        settled = self.make(merge_overrides(values, open_settings))
        settled._requested, settled._notes = prepared._requested, (*prepared._notes, *notes)
        return settled

    def differs(self, saved: Experiment) -> list[str]:
        """The keys whose value differs in a saved experiment; settings that are open here do not count."""
        without: Any = {"sites": {"__all__": {"root"}}}  # their contents have hashes of their own
        ours = flatten(self.model_dump(mode="json", exclude=without))
        theirs = flatten(saved.model_dump(mode="json", exclude=without))
        return [
            key
            for key in sorted(ours.keys() | theirs.keys())
            if not key.startswith("engine.")
            and key not in ("data.root", "plugins")
            and ours.get(key) not in (None, AUTO)
            and ours[key] != theirs.get(key)
        ]

    def depends_on_rounds(self, rounds: int) -> dict[str, tuple[Any, Any]]:
        """The method's options that a rule derives from the number of rounds, if they differ for another number.

        Returns:
            `method.option` → (the value now, the value for `rounds` rounds).
        """
        config = registry.find("method", self.method.name).configure(self.method.options).reopened()
        now = config.resolve(self)
        other = self.model_copy(update={"training": self.training.model_copy(update={"rounds": rounds})})
        then = config.resolve(other)
        return {
            f"method.{name}": (value, then[name][0])
            for name, (value, _) in now.items()
            if flatten(self.method.options).get(name) == value != then[name][0]
        }

    def to_toml(self) -> str:
        return tomli_w.dumps(json.loads(self.model_dump_json(exclude_none=True, exclude=self.data.unused)))

    def fingerprint(self) -> str:
        """A hash of everything that the weights of a round depend on.

        Not included: the engine, the locations of data and plug-ins (their contents have hashes of their own) and the
        number of rounds.
        """
        without: Any = {"engine": True, "plugins": True, "data": {"root"}, "training": {"rounds"}}
        without |= {"study": True} if self.study is None else {}
        without |= {"sites": True if self.sites is None else {"__all__": {"root"}}}
        values = self.prepared().model_dump(mode="json", exclude=without)
        values["data"]["name"] = self.data.label
        for values_of_site, site in zip(values.get("sites") or (), self.sites or (), strict=True):
            values_of_site["data"] = site.label
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _requested_values(experiment: Experiment) -> dict[str, Any]:
    """The values that the user set; all other settings are defaults or follow from rules."""
    method = registry.find("method", experiment.method.name)
    values = experiment.model_dump(exclude_unset=True)
    if "method" in values:
        values["method"] = {"name": experiment.method.name, **method.canonical_options(experiment.method.options)}
    return values
