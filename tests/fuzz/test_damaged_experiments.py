"""Experiment files with damage, and settings with any value: an experiment, or one sentence about the setting."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import limited_time
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from mutations import MUTATIONS, SEED

from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import flatten
from fedmll.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXPERIMENTS = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.toml"))
INTERNALS = re.compile(r"function-|constrained-|tuple|literal\[|pydantic|instance of|\w\(\)")
KEYS = sorted(
    {*flatten(Experiment().model_dump()), "method.weighting", "data", "plugins", "sites", "participation.fraction"}
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


def load(values: dict[str, Any] | Path) -> Experiment | str:
    """The experiment, or why it is rejected."""
    try:
        with limited_time():
            return Experiment.load(values) if isinstance(values, Path) else Experiment().changed(values)
    except ConfigError as error:
        return str(error)


def test_damaged_experiment_files(tmp_path: Path) -> None:
    assert EXPERIMENTS
    draw, accepted, rejected = Random(f"{SEED} experiments"), 0, 0
    file = tmp_path / "experiment.toml"
    for source in EXPERIMENTS:
        for mutation in MUTATIONS * 12:
            file.write_bytes(mutation(source.read_bytes(), draw))
            found = load(file)
            if isinstance(found, str):
                rejected += 1
                assert "\n" not in found and len(found) < 3000, found
            else:
                accepted += 1
                again = tmp_path / "again.toml"
                again.write_text(found.to_toml())
                assert load(again) == found, file.read_bytes()
    assert accepted and rejected


@hypothesis_seed(SEED)
@settings(max_examples=600, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_settings_of_any_value(key: str, value: Any) -> None:
    found = load({key: value})
    if isinstance(found, str):
        without_value = re.sub(r"\(it is .*\)", "", found, flags=re.DOTALL)
        assert key.split(".")[-1] in found and not INTERNALS.search(without_value), found
