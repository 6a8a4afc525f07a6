"""The metadata of a model file: its keys, their types, and the experiment in it.

A model file is data and can come from anybody. Only known sections and keys are accepted, and no path in the file is
ever opened. Plug-ins are named in it; the user passes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmll.config.experiment import Experiment
from fedmll.config.settings import RANDOM, SettingsSection
from fedmll.config.toml_values import is_nested_deeper
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import printable
from fedmll.core.versions import fedmll_version

FORMAT_VERSION = 1
# Settings of an experiment that a model file never has; None: the whole section
NEVER_STORED: dict[str, set[str] | None] = {
    "engine": None, "plugins": None, "data": {"root"}, "model": {"weights"}, "sites": {"root"}
}  # fmt: skip

MAX_METADATA = 2**24  # characters of JSON
MAX_DEPTH = 16  # levels of lists and objects in it
MAX_SAMPLE = 2**26  # values of a sample: an image of 4096 × 4096 with 3 channels has 50 million

Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Sizes = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=3)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class PluginWarning(UserWarning):
    """A plug-in file that the user passed is not the one that the model was trained with."""


class PixelScale(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    mean: list[float]
    std: list[float]


class ThresholdResults(BaseModel):
    """What the thresholds give on the test data, one value per class; shares in percent, None where undefined."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    positives: list[int]
    recall: list[float | None]
    precision: list[float | None]
    f1: list[float | None]


class ModelDescription(BaseModel):
    """The metadata of a model file: every key and its type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    checksum: str  # of everything else in the file: see core/tensor_files.py
    format: int
    versions: dict[str, str]
    method: str
    head: str
    takes_known_labels: bool
    classes: Names
    sample_shape: Sizes
    pixels: PixelScale | None
    window: Pair | None
    thresholds: list[float] | None
    thresholds_for: str | None = None
    threshold_results: ThresholdResults | None = None
    calibration: list[Pair] | None = None
    clients: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    initial_weights: str | None
    layout: dict[str, Any] | None
    frozen: list[str]
    plugins: list[str]  # file names
    plugin_checksums: list[str | None] = []  # SHA-256, in the order of `plugins`
    experiment: dict[str, Any]


def parse_metadata(file: Path, text: str) -> Any:
    """Parse the JSON of a description. Text that is too long or nested too deep is rejected: it may be an attack."""
    refused = f"{file} is refused because its metadata"
    if len(text) > MAX_METADATA:
        raise ConfigError(f"{refused} has {len(text):,} characters, and at most {MAX_METADATA:,} are accepted.")
    try:
        description = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{refused} is nested deeper than {MAX_DEPTH} levels.") from None
    if is_nested_deeper(description, MAX_DEPTH):
        raise ConfigError(f"{refused} is nested deeper than {MAX_DEPTH} levels.")
    return description


def check_format(file: Path, description: Any) -> None:
    """Raise ConfigError for a file of another program or another format version, and for unknown keys."""
    if not isinstance(description, Mapping) or "format" not in description:
        raise ConfigError(
            f"{file} does not say what model it is: it was not written by fedmll. `fedmll resume FOLDER` writes the "
            "model of a run again, without training."
        )
    if description["format"] != FORMAT_VERSION:
        raise ConfigError(
            f"{file} has the format version {printable(description['format'], 40)}, and this fedmll reads version "
            f"{FORMAT_VERSION}. It was written by fedmll {writer_version(description)}: use that version."
        )
    unknown = next(_unknown_keys(description), None)
    if unknown is not None:
        raise ConfigError(
            f"{file} is refused because its metadata has the unknown key '{printable(unknown, 80)}', which a model "
            f"file of this fedmll ({fedmll_version()}) never has; get the file again from whoever trained the model, "
            f"or use the fedmll that wrote it ({writer_version(description)})."
        )


def check_complete(file: Path, description: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key is missing or a value has the wrong type."""
    try:
        ModelDescription.model_validate(dict(description))
    except ValidationError as error:
        first = error.errors()[0]
        where = printable(".".join(map(str, first["loc"])), 80)
        raise ConfigError(
            f"{file} is refused because '{where}' in its metadata is wrong ({printable(first['msg'], 100)}); get the "
            "file again from whoever trained the model."
        ) from None
    if math.prod(description["sample_shape"]) > MAX_SAMPLE:
        raise ConfigError(
            f"{file} is refused because its metadata has samples of shape {description['sample_shape']}, and at most "
            f"{MAX_SAMPLE:,} values are accepted; get the file again from whoever trained the model."
        )
    one_per_class = {name: description.get(name) for name in ("thresholds", "calibration")}
    one_per_class |= {f"threshold_results.{k}": v for k, v in (description.get("threshold_results") or {}).items()}
    for name, values in one_per_class.items():
        if values is not None and len(values) != len(description["classes"]):
            raise ConfigError(
                f"{file} is refused because its metadata has {len(values)} values of '{name}' for "
                f"{len(description['classes'])} classes; get the file again from whoever trained the model."
            )


def _unknown_keys(description: Mapping[str, Any]) -> Iterator[str]:
    yield from description.keys() - ModelDescription.model_fields.keys()
    experiment = description.get("experiment")
    for section, values in experiment.items() if isinstance(experiment, Mapping) else ():
        never_stored = NEVER_STORED.get(section, set())
        if section not in Experiment.model_fields or never_stored is None:
            yield f"experiment.{section}"
        elif section != "method" and isinstance(values, Mapping):  # the method checks its own options
            known = _section_keys(section) - never_stored
            yield from (f"experiment.{section}.{key}" for key in values if key not in known)
        elif isinstance(values, list):  # [[sites]]
            sites = [site for site in values if isinstance(site, Mapping)]
            yield from (f"experiment.{section}.{key}" for site in sites for key in site if key in never_stored)


def _section_keys(section: str) -> set[str]:
    annotation = Experiment.model_fields[section].annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return {name for kind in kinds if issubclass(kind, SettingsSection) for name in kind.model_fields}


def build_experiment(file: Path, description: Mapping[str, Any]) -> Experiment:
    """The experiment that a file describes, without paths: prediction needs neither data nor partition, and nothing is
    searched on this machine because a file names it."""
    values = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in description["experiment"].items()
    }
    if isinstance(values.get("data"), dict) and isinstance(values["data"].get("name"), str):
        values["data"]["name"] = values["data"]["name"].partition(":")[0]  # the source, without its file
    if isinstance(values.get("sites"), list):
        values["sites"] = [
            {**site, "data": str(site.get("data")).partition(":")[0]} if isinstance(site, Mapping) else site
            for site in values["sites"]
        ]
    if isinstance(values.get("partition"), dict):
        values["partition"].pop("file", None)
    if isinstance(values.get("model"), dict):
        values["model"]["weights"] = RANDOM  # the file's weights replace them
    try:
        return Experiment.make(values)
    except ConfigError as error:
        plugins = ", ".join(map(_file_name, description["plugins"]))
        hint = f" It was made with the plug-in {plugins}: pass it with --plugin." if plugins else ""
        raise ConfigError(f"{file} cannot be used: {error}{hint}") from None


def compare_plugins(file: Path, description: Mapping[str, Any], passed: Sequence[Path]) -> list[str]:
    """One warning for each plug-in of the model that is not among the files that the user passed, by checksum."""
    if not passed:
        return []
    checksums = {files.checksum(path) for path in passed}
    trained_with = zip(description["plugins"], description.get("plugin_checksums", ()), strict=False)
    return [
        f"{file} was trained with the plug-in {_file_name(name)} (SHA-256 {printable(checksum, 12)}), and no file "
        "passed with --plugin has this checksum. The predictions may differ."
        for name, checksum in trained_with
        if checksum is not None and checksum not in checksums
    ]


def _file_name(name: str) -> str:
    """The name of a plug-in file, without folders."""
    return printable(Path(name).name, 80)


def writer_version(description: Mapping[str, Any]) -> str:
    """The fedmll version that wrote a file, as the file itself says."""
    versions = description.get("versions")
    return printable(versions.get("fedmll", "unknown"), 40) if isinstance(versions, Mapping) else "unknown"
