"""`table:FILE`: features and labels in a CSV or Parquet file."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedmll
from fedmll.cli.main import app
from fedmll.core.errors import DataError
from fedmll.data.sources import load
from fedmll.data.sources.table import encode, read_table

HEADER = "age,smoker,client,split,label:cough,label:fever"
ROWS = [
    "10,yes,north,train,1,0",
    "30,no,south,train,,1",
    ",yes,north,train,0,1",
    "50,,south,test,1,0",
    "20,maybe,north,test,0,",
]


def written(folder: Path, *rows: str, header: str = HEADER) -> Path:
    file = folder / "t.csv"
    file.write_text("\n".join([header, *(rows or ROWS)]) + "\n")
    return file


def test_columns_become_features_labels_clients_and_splits(tmp_path: Path) -> None:
    splits = load(f"table:{written(tmp_path)}")
    train, test = splits.train, splits.test
    assert train.classes == ("cough", "fever")
    assert train.labels.tolist() == [[1, 0], [-1, 1], [0, 1]]
    assert test.labels.tolist() == [[1, 0], [0, -1]]
    assert train.groups.tolist() == ["north", "south", "north"]
    # age: mean 20, standard deviation 10 of the training rows; smoker: no, yes
    assert train.samples(slice(None)).tolist() == [[-1, 0, 1], [1, 1, 0], [0, 0, 1]]
    assert test.samples(slice(None)).tolist() == [[3, 0, 0], [0, 0, 0]]
    assert splits.encoding == (("age", (20.0, 10.0)), ("smoker", ("no", "yes")))
    assert len(splits.notes) == 2


def test_parquet_has_the_same_content(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    file = written(tmp_path)
    pandas.read_csv(file).to_parquet(tmp_path / "t.parquet")
    ours, theirs = load(f"table:{file}"), load(f"table:{tmp_path / 't.parquet'}")
    assert np.array_equal(ours.train.samples(slice(None)), theirs.train.samples(slice(None)))
    assert np.array_equal(ours.test.labels, theirs.test.labels)


def test_a_constant_column_is_zero(tmp_path: Path) -> None:
    file = written(tmp_path, "3,train,1", "3,train,0", "5,test,1", header="a,split,label:x")
    assert load(f"table:{file}").test.samples(slice(None)).tolist() == [[2.0]]


MISTAKES = {
    "no labels": (HEADER.replace("label:", ""), ROWS, "no column is a label"),
    "a label": (HEADER, [*ROWS, "1,no,north,train,maybe,1"], "has 'maybe'; a label is 1, 0 or blank"),
    "a split": (HEADER, [*ROWS, "1,no,north,dev,1,1"], "has 'dev'; it must be train"),
    "fields": (HEADER, [*ROWS, "1,2"], "line 7 has not 6 fields"),
    "no rows": (HEADER, [""], "has no rows"),
    "a column twice": ("a,a,label:x", ["1,2,1"], "'a' appears twice"),
    "no features": ("client,label:x", ["a,1"], "a column of features is needed"),
    "infinity": ("a,split,label:x", ["inf,train,1", "1,test,0"], "infinite"),
    "an empty column": ("a,split,label:x", [",train,1", "1,test,0"], "no value in the training rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    header, rows, expected = MISTAKES[name]
    with pytest.raises(DataError, match=expected):
        load(f"table:{written(tmp_path, *rows, header=header)}")


def test_too_many_values_of_text(tmp_path: Path) -> None:
    rows = [f"name {number},{number % 2}" for number in range(300)]
    with pytest.raises(DataError, match=r"different values, such as .*Ignore it"):
        load(f"table:{written(tmp_path, *rows, header='name,label:x')}")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    for name, expected in (("t.xlsx", "must end in .csv or .parquet"), ("none.csv", "does not exist")):
        with pytest.raises(DataError, match=expected):
            load(f"table:{tmp_path / name}")


def test_predictions_use_the_stored_encoding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ages = rng.integers(20, 80, 200)
    file = written(tmp_path, *(f"{age},{'yes' if age > 50 else 'no'},{int(age > 50)}" for age in ages),
                   header="age,smoker,label:old")  # fmt: skip
    out = tmp_path / "run"
    fedmll.run(None, out, data=f"table:{file}", method="fedavg", rounds=3, clients=3)
    model = fedmll.load_model(out / "model.safetensors")
    asked = tmp_path / "new.csv"
    asked.write_text("smoker,age\nyes,70\n,25\nsometimes,\n")
    scores = model.predict(str(asked))
    encoding = model.experiment.data.encoding
    assert encoding is not None
    assert np.array_equal(scores, model.predict(encode(read_table(asked), encoding, "")))
    assert scores[0, 0] > scores[1, 0]
    done = CliRunner().invoke(app, ["predict", str(out), str(asked), "--out", str(tmp_path / "p.csv")])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0].endswith("old")
    assert len(lines) == 4
    asked.write_text("age\n3\n")
    with pytest.raises(DataError, match="no column 'smoker', which the model uses"):
        model.predict(str(asked))
    asked.write_text("smoker,age\nyes,old\n")
    with pytest.raises(DataError, match="'old' in the column 'age' is not a number"):
        model.predict(str(asked))


def test_example_runs_and_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[2] / "examples" / "table.py"
    assert len(file.read_text().splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")
    assert "macro_auc" in capsys.readouterr().out
