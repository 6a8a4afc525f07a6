from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from all_methods import names

from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import merge_overrides, parse_value
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative


def test_toml_round_trip_gives_the_same_experiment(tmp_path: Path) -> None:
    experiment = Experiment.make({"seed": 3, "method": {"name": "fedprox", "mu": 0.5}, "training": {"lr": 0.01}})
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.to_toml())
    again = Experiment.load(path)
    assert again == experiment
    assert again.fingerprint() == experiment.fingerprint()
    assert "mu = 0.5" in path.read_text()
    assert 'backbone = "convnet"' in path.read_text()  # defaults are written out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainning": {}}, "no key 'trainning'; did you mean 'training'"),
        ({"training": {"learning_rate": 1}}, "no key 'training.learning_rate'"),
        ({"training": {"batchsize": 8}}, "no key 'training.batchsize'; did you mean 'batch_size'"),
        ({"method": {"name": "fedporx"}}, "no method 'fedporx'; did you mean 'fedprox'"),
        ({"method": {"name": "fedprox", "nu": 1}}, "no key 'method.nu'; did you mean 'mu'"),
        ({"method": {"name": "fedprox", "mu": -1}}, "method.mu: .*greater than or equal to 0"),
        ({"training": {"lr": 0}}, "training.lr: .*greater than 0"),
        ({"training": {"lr": float("nan")}}, "training.lr"),
        ({"training": {"rounds": 0}}, "training.rounds"),
        ({"partition": {"kind": "dirichlett"}}, "partition.kind"),
        ({"partition": {"presence": 1.5}}, "partition.presence"),
        ({"partition": {"presence": 0.0}}, "partition.presence"),
        ({"partition": {"clients": 0}}, "partition.clients"),
        ({"partition": {"minimum": 0}}, "partition.minimum"),
        ({"partition": {"unassignable": "dorp"}}, "partition.unassignable: .*'drop'"),
        ({"participation": {"fraction": 0.0}}, "participation.fraction"),
        ({"participation": {"fraction": 1.01}}, "participation.fraction"),
        ({"participation": {"sampling": "sizes"}}, "participation.sampling: .*'size'"),
        ({"data": {"layout": "quadrant"}}, "data.layout: .*'quadrants'"),
        ({"data": {"singles": -1}}, "data.singles"),
        ({"data": {"pairs": "all"}}, "data.pairs"),
        ({"participation": {"count": 11}}, "participation.count = 11 is more than partition.clients = 10"),
        ({"model": {"backbone": "mlp"}}, "mlp is for feature vectors"),
        ({"model": {"channels": [0]}}, "model.channels: .*greater than or equal to 1"),
        ({"model": {"backbone": "small-vit", "channels": []}}, "model.channels is empty: a small-vit"),
        ({"model": {"width": 10**39}}, "model.width: .*less than or equal to 65536"),
        ({"training": {"batch_size": 10**39}}, "training.batch_size: Input should be less than 2147483648"),
        ({"training": {"rounds": 10**39}}, "training.rounds: Input should be less than 2147483648"),
        ({"plugins": [1]}, r"plugins: Input should be a valid string \(it is 1\)"),
        ({"data": {"name": "features:x.npz"}, "model": {"backbone": "resnet18"}}, "does not fit data.name"),
    ],
)
def test_error_names_the_unknown_or_impossible_setting(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.make(values)


AVERAGE = {"average": "mean", "trim": 0.2}
START = {"start": "seed", "ridge": "gcv", "ridge_balanced": False, "server_optimizer": "none", "server_lr": "auto"}
START |= {"server_beta1": "auto", "server_beta2": 0.99, "server_tau": 1e-3}
START |= {"refit": "none", "logistic": "held-out", "logistic_balanced": False, "logistic_rounds": 10}


def test_changed_method_starts_with_its_own_options() -> None:
    prox = Experiment.make({"method": {"name": "fedprox", "mu": 0.5, "weighting": "equal"}})
    assert prox.changed({"seed": 4}).method.options == {"mu": 0.5, "weighting": "equal"} | AVERAGE | START
    assert prox.changed({"method.name": "fedavg"}).method.options == {"weighting": "size"} | AVERAGE | START
    assert prox.changed({"method.name": "centralized"}).training.keep == "best"
    assert prox.changed({"method.name": "centralized"}).changed({"method.name": "fedavg"}).training.keep == "last"


def test_fingerprint_depends_on_what_the_result_depends_on() -> None:
    base = Experiment()
    assert base.changed({"engine.workers": 7, "data.root": "/elsewhere"}).fingerprint() == base.fingerprint()
    for key, value in (("seed", 1), ("training.lr", 0.5), ("method.weighting", "equal"), ("partition.beta", 9.0)):
        assert base.changed({key: value}).fingerprint() != base.fingerprint()


def test_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'seed' is a value"):
        merge_overrides({"seed": 1}, {"seed.x": 2})


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment file"):
        Experiment.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("seed = [")
    with pytest.raises(ConfigError, match="not a TOML file"):
        Experiment.load(tmp_path / "bad.toml")
    (tmp_path / "plugins.toml").write_text("plugins = [1]")
    with pytest.raises(ConfigError, match="plugins: Input should be a valid string"):
        Experiment.load(tmp_path / "plugins.toml")


@pytest.mark.parametrize(
    "text", [f"x = {'[' * 3000}{']' * 3000}", f"{'a.' * 3000}a = 1", f"x = {'{a = ' * 300}1{'}' * 300}"]
)
def test_deeply_nested_toml_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"deep\.toml is nested more than 20 levels deep"):
        Experiment.load(tmp_path / "deep.toml")
    with pytest.raises(ConfigError, match="is nested more than 20 levels deep"):
        parse_value(f"{'[' * 3000}{']' * 3000}")
    with pytest.raises(ConfigError, match="is nested more than 20 levels deep"):
        merge_overrides({}, {f"{'a.' * 3000}a": 1})


def test_every_published_setting_is_valid() -> None:
    for name in names():
        method = registry.find("method", name)
        changed = Experiment().changed({"data.name": "digits", "method.name": name} | method.published)
        assert changed.method.name == name
        assert method.summary


class PartWithLimit(Part):
    name = "limit"

    class Options(PartOptions):
        limit: float | None = option(2.0, "None: no limit")
        floor: float | None = option(None, "None: from the data")


def test_option_none_is_refused_where_the_default_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """TOML has no None: a resumed run would train with the default."""
    monkeypatch.setitem(registry._registered, "method", dict(registry._registered["method"]))

    class Limited(Method):
        name, summary, paper, parts = "limited", "FedAvg with a limit", "none", (UnknownAsNegative, PartWithLimit)

    assert "floor" not in Experiment.make({"method": {"name": "limited", "floor": None}}).method.options
    with pytest.raises(ConfigError, match=r"method.limit = None cannot be stored .* its default 2.0"):
        Experiment.make({"method": {"name": "limited", "limit": None}})


def test_number_with_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(f"seed = {'9' * 5000}\n")
    with pytest.raises(ConfigError, match=r"e\.toml is not a TOML file: Exceeds the limit"):
        Experiment.load(tmp_path / "e.toml")
    assert parse_value("9" * 5000) == "9" * 5000, "text, which validation rejects"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.size", "x", "data.size: Input should be a valid integer (it is 'x')."),
        ("data.size", [], "data.size: The list needs more values (it is [])."),
        ("data.size", [8, "a"], "data.size: Input should be a valid integer (it is 'a')."),
        (
            "data.singles",
            -1,
            "data.singles: Input should be greater than or equal to 1 or 'proportional' or 'all' (it is",
        ),
        ("data.pairs", [], "data.pairs: Input should be a valid integer or 'proportional' (it is [])."),
        ("model.channels", 8, "model.channels: Input should be a list (it is 8)."),
        ("model.freeze", "x", "model.freeze: Input should be 'none' or 'backbone' or a valid integer (it is 'x')."),
        ("data", 3, "data: Input should be a section with keys (it is 3)."),
    ],
)
def test_messages_use_the_words_of_the_file(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment().changed({key: value})
    assert str(error.value).startswith(f"The experiment is not valid: {message}")
