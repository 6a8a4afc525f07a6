"""The labels file: class columns, wrong rows, and one report of all problems."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.images.labels_csv import LabelTable, read_labels
from fedmll.data.sources import load
from fedmll.deploy.site.check import check_site
from fedmll.deploy.site.site_config import Site


def table_of(folder: Path, text: str, reading: ReadingOptions | None = None, images: int = 6) -> LabelTable:
    """`text` as a labels file beside images 0.png, 1.png, …"""
    for number in range(images):
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "labels.csv").write_text(text, encoding="utf-8")
    return read_labels(folder / "labels.csv", folder, reading)


def report(table: LabelTable) -> str:
    with pytest.raises(DataError) as error:
        table.problems.report()
    assert "\n" not in str(error.value)
    return str(error.value)


MESSY = """image,Patient,age,cat,dog
0.png,p1,63,1,0
1.png,p1,64,0,1
2.png,p2,1,,1
"""


def test_a_good_file_has_no_problems(tmp_path: Path) -> None:
    table = table_of(tmp_path, "image,cat,split,client\n0.png, 1 ,train,a\n1.png,0,VAL,b\n")
    table.problems.report()
    assert table.labels.tolist() == [[1], [0]]
    assert table.split is not None
    assert table.split.tolist() == [0, 1]
    assert table.clients is not None
    assert table.clients.tolist() == ["a", "b"]
    assert table.patients is None
    assert not table.is_list_form
    assert not table.missing


# --- columns


def test_error_proposes_to_ignore_all_columns_that_are_not_classes(tmp_path: Path) -> None:
    text = report(table_of(tmp_path, MESSY))
    assert "3 in column 'Patient' (row 2: 'p1'; row 3: 'p1'; and 1 more)" in text
    assert "2 in column 'age' (row 2: '63'; row 3: '64')" in text, "1 would be a label"
    assert """--set 'data.ignore=["Patient","age"]'""" in text
    assert """--set data.group=Patient --set 'data.ignore=["age"]'""" in text
    options = report(table_of(tmp_path, MESSY, ReadingOptions(by_options=True)))
    assert "--ignore=Patient,age" in options
    assert "--group=Patient --ignore=age" in options


def test_error_without_patient_column_proposes_no_group(tmp_path: Path) -> None:
    text = report(table_of(tmp_path, MESSY.replace("Patient", "who").replace("age", "it's")))
    assert "data.group" not in text
    assert """--set 'data.ignore=["who","it'"'"'s"]'""" in text, "ready to be copied into a shell"
    chosen = report(table_of(tmp_path, MESSY, ReadingOptions(classes=("age", "cat"))))
    assert chosen.endswith("Leave columns that are not classes out of data.classes.")
    only = report(table_of(tmp_path, MESSY, ReadingOptions(ignore=("age",))))
    assert only.endswith("--set data.group=Patient.")


def test_many_wrong_columns_are_counted_and_all_proposed_to_be_ignored(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(8)]
    text = report(table_of(tmp_path, f"image,cat,{','.join(names)}\n0.png,1{',x' * 8}\n1.png,0{',y' * 8}\n"))
    assert "2 in column 'c4' (row 2: 'x'; and 1 more); and 3 more. A label is 1 (present)" in text
    assert """["c0","c1","c2","c3","c4","c5","c6","c7"]""" in text


@pytest.mark.parametrize(
    ("reading", "classes", "labels"),
    [
        (ReadingOptions(ignore=("Patient", "age")), ("cat", "dog"), [[1, 0], [0, 1], [-1, 1]]),
        (ReadingOptions(classes=("dog", "cat")), ("dog", "cat"), [[0, 1], [1, 0], [1, -1]]),
        (ReadingOptions(classes=("dog",), ignore=("age",)), ("dog",), [[0], [1], [1]]),
        (ReadingOptions(ignore=("age",), group="Patient"), ("cat", "dog"), [[1, 0], [0, 1], [-1, 1]]),
    ],
)
def test_classes_and_ignore_choose_columns(
    tmp_path: Path, reading: ReadingOptions, classes: tuple[str, ...], labels: list[list[int]]
) -> None:
    table = table_of(tmp_path, MESSY, reading)
    table.problems.report()
    assert table.classes == classes
    assert table.labels.tolist() == labels
    assert (table.patients is not None) == (reading.group is not None)


def test_ignored_column_has_no_effect(tmp_path: Path) -> None:
    text = "image,cat,split,client\n0.png,1,train,a\n1.png,0,test,b\n"
    table = table_of(tmp_path, text, ReadingOptions(ignore=("split", "client")))
    assert table.split is None
    assert table.clients is None
    first = table_of(tmp_path, "number,scan,cat\n7,0.png,1\n8,1.png,0\n", ReadingOptions(ignore=("number",)))
    first.problems.report()
    assert first.names == ["0.png", "1.png"], "now the first column is the image"


def test_settings_that_name_a_missing_column_are_reported(tmp_path: Path) -> None:
    reading = ReadingOptions(classes=("cat", "dgo"), ignore=("Age",), group="patients")
    text = report(table_of(tmp_path, MESSY, reading))
    assert "data.classes names 'dgo', which is not a column; did you mean 'dog'" in text
    assert "data.ignore names 'Age', which is not a column; did you mean 'age'" in text
    assert "data.group names 'patients', which is not a column; did you mean 'Patient'" in text
    assert "has 3 problems. (1) " in text
    for name in ("classes", "ignore"):
        with pytest.raises(ConfigError, match=f"data.{name} names 'a' twice"):
            ReadingOptions(**{name: ("a", "b", "a")})  # type: ignore[arg-type]


def test_unnamed_blank_column_is_ignored_and_one_with_content_is_reported(tmp_path: Path) -> None:
    """The first comes from a comma at the end of every line, the second from pandas' index."""
    table = table_of(tmp_path, "image,cat,\n0.png,1,\n1.png,0, \n")
    table.problems.report()
    assert table.classes == ("cat",)
    assert "in the header: 1; 4." in report(table_of(tmp_path, ",image,cat,\n0,0.png,1,1\n1,1.png,0,0\n"))


def test_empty_client_column_is_ignored(tmp_path: Path) -> None:
    assert table_of(tmp_path, "image,cat,client\n0.png,1,\n1.png,0, \n").clients is None
    partly = table_of(tmp_path, "image,cat,client\n0.png,1,\n1.png,0,b\n").clients
    assert partly is not None
    assert partly.tolist() == ["", "b"]


# --- the list form


def test_list_form_gives_present_absent_and_unknown(tmp_path: Path) -> None:
    text = "image,labels\n0.png,b|a\n1.png,NONE\n2.png,\n3.png,no finding\n4.png, a |\n"
    table = table_of(tmp_path, text)
    table.problems.report()
    assert table.is_list_form
    assert table.classes == ("a", "b")
    assert table.labels.tolist() == [[1, 1], [0, 0], [-1, -1], [0, 0], [1, 0]]
    chosen = table_of(tmp_path, text, ReadingOptions(classes=("b", "c")))
    chosen.problems.report()
    assert chosen.classes == ("b", "c")
    assert chosen.labels.tolist() == [[1, 0], [0, 0], [-1, -1], [0, 0], [0, 0]]


def test_none_together_with_a_class_is_rejected(tmp_path: Path) -> None:
    assert "1 row has both 'none' and a class (row 3: 'none|a')" in report(
        table_of(tmp_path, "image,labels\n0.png,a\n1.png,none|a\n2.png,none|No Finding\n")
    )


@pytest.mark.parametrize("cell", ["", "none"])
def test_lists_without_a_class_are_reported(tmp_path: Path, cell: str) -> None:
    assert "'labels' names no class in any row" in report(table_of(tmp_path, f"image,labels\n0.png,{cell}\n1.png,\n"))


def test_labels_column_beside_other_columns_proposes_to_ignore_them(tmp_path: Path) -> None:
    text = "image,labels,age,sex\n0.png,a,3,m\n1.png,b,4,f\n"
    assert """also 'age'; 'sex'.""" in report(table_of(tmp_path, text))
    assert """--set 'data.ignore=["age","sex"]'.""" in report(table_of(tmp_path, text))
    for reading in (ReadingOptions(ignore=("age", "sex")), ReadingOptions(classes=("a", "b"))):
        table = table_of(tmp_path, text, reading)
        table.problems.report()
        assert table.classes == ("a", "b")


# --- images


def test_backslash_separates_folders_unless_a_file_has_that_name(tmp_path: Path) -> None:
    (tmp_path / "site-a").mkdir()
    for name in ("site-a/7.png", "odd\\8.png"):
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
    table = table_of(tmp_path, "image,cat\nsite-a\\7.png,1\nodd\\8.png,0\n")
    table.problems.report()
    assert table.paths == [tmp_path / "site-a" / "7.png", tmp_path / "odd\\8.png"]
    twice = report(table_of(tmp_path, "image,cat\nsite-a\\7.png,1\nsite-a/7.png,0\n"))
    assert "row 3: 'site-a/7.png' is already in row 2" in twice


def test_path_that_is_not_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    text = "image,cat,split\nfolder.png,1,train\n,0,train\n0.png,1,test\nbad\0.png,1,train\n"
    found = report(table_of(tmp_path, text))
    assert "3 of its 4 images do not exist: row 2: " in found
    assert "--skip-unreadable" in found
    table = table_of(tmp_path, text, ReadingOptions(skip_unreadable=True))
    table.problems.report()
    assert table.names == ["0.png"]
    assert table.labels.tolist() == [[1]]
    assert table.split is not None
    assert table.split.tolist() == [2]
    assert len(table.missing) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_image_without_read_permission_is_missing(tmp_path: Path) -> None:
    table_of(tmp_path, "image,cat\n0.png,1\n")
    (tmp_path / "0.png").chmod(0)
    assert "1 of its 1 images do not exist" in report(read_labels(tmp_path / "labels.csv", tmp_path))


def test_rows_are_left_out_of_every_column(tmp_path: Path) -> None:
    text = "image,cat,split,client,who\n0.png,1,train,a,x\nlost.png,0,test,b,y\n2.png,0,val,c,z\n"
    table = table_of(tmp_path, text, ReadingOptions(group="who", skip_unreadable=True))
    table.problems.report()
    assert table.names == ["0.png", "2.png"]
    assert table.paths == [tmp_path / "0.png", tmp_path / "2.png"]
    assert table.labels.tolist() == [[1], [0]]
    columns = [values.tolist() for values in (table.split, table.clients, table.patients) if values is not None]
    assert columns == [[0, 1], ["a", "c"], ["x", "z"]]
    assert table.sizes_and_times[1][0] == (tmp_path / "2.png").stat().st_size
    assert table.missing == [f"row 3: '{tmp_path / 'lost.png'}'"]


def test_no_existing_image_is_an_error_even_with_skip_unreadable(tmp_path: Path) -> None:
    table = table_of(tmp_path, "image,cat\na.png,1\nb.png,0\n", ReadingOptions(skip_unreadable=True))
    assert "none of its 2 images exists: row 2: " in report(table)


# --- patients


def test_patient_in_two_parts_of_the_split_is_named(tmp_path: Path) -> None:
    rows = "0.png,1,train,p1\n1.png,1,test,p1\n2.png,1,val,p2\n3.png,1,train,p2\n4.png,0,test,p3\n5.png,0,test,p3\n"
    text = report(table_of(tmp_path, f"image,cat,split,who\n{rows}", ReadingOptions(group="who")))
    assert "2 of 'who' are in more than one part of the split: 'p1'; 'p2'." in text


def test_a_row_without_a_patient_is_named(tmp_path: Path) -> None:
    text = report(table_of(tmp_path, "image,cat,who\n0.png,1,p1\n1.png,1, \n", ReadingOptions(group="who")))
    assert "1 row has no 'who' (row 3), which data.group needs" in text


# --- all at once


def test_every_kind_of_problem_is_in_one_report(tmp_path: Path) -> None:
    text = (
        "image,cat,cat,dog,split\n0.png,1,1,0,train\n1.png,1,1,maybe,train\n2.png,1,1,0,later\n"
        "2.png,1,0,0,test\n9.png,1,0,0,test\n3.png,1,0,test\n"
    )
    found = report(table_of(tmp_path, text))
    assert found.startswith(f"'{tmp_path / 'labels.csv'}' has 6 problems. (1) ")
    for part in (
        "1 row has more or fewer cells than the header, which has 5: row 7: 4 cells",
        "the class 'cat' appears twice",
        "1 in column 'dog' (row 3: 'maybe')",
        "1 row has a split other than train, validation (or val) and test (row 4: 'later')",
        "1 row has an image that another row has (row 5: '2.png' is already in row 4)",
        "1 of its 5 images do not exist: row 6: ",
    ):
        assert part in found


def test_examples_are_capped_and_counted(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,x,later\n" for number in range(7))
    found = report(table_of(tmp_path, f"image,cat,split\n{rows}", images=7))
    assert "7 in column 'cat' (row 2: 'x'; row 3: 'x'; row 4: 'x'; row 5: 'x'; row 6: 'x'; and 2 more)" in found
    assert "7 rows have a split other than" in found
    assert "row 6: 'later'; and 2 more)" in found
    five = report(table_of(tmp_path, f"image,cat,split\n{rows[: 5 * len('0.png,x,later ')]}", images=7))
    assert "more" not in five


def test_long_cell_is_cut_in_the_message(tmp_path: Path) -> None:
    text = report(table_of(tmp_path, f"image,sick\n0.png,{'9' * 5000}\n1.png,1\n"))
    assert "cells that are not labels: 1 in column 'sick' (row 2: '999" in text and len(text) < 500


def test_rows_that_all_have_the_wrong_number_of_cells(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 rows have more or fewer cells.*row 2: 3 cells; row 3: 1 cells"):
        table_of(tmp_path, "image,cat\n0.png,1,0\n1.png\n")


@pytest.mark.parametrize("other", ["../images/1.png", "a/../1.png", "link.png", "linked/1.png", "./1.png"])
def test_image_with_two_names_is_reported(tmp_path: Path, other: str) -> None:
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "link.png").symlink_to(folder / "1.png")
    (folder / "linked").symlink_to(folder)
    text = f"image,cat,split\n0.png,1,train\n1.png,1,train\n2.png,0,train\n{other},1,test\n"
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(
        DataError, match=f"1 row has an image that another row has .row 5: '{other}' is already in row 3"
    ):
        load(f"folder:{tmp_path / 'labels.csv'}", folder)


def test_check_says_that_a_text_column_is_text(tmp_path: Path) -> None:
    """Also if the column of the site has another name in the study."""
    table_of(tmp_path, "image,note,cat,dog\n0.png,fine,1,0\n1.png,ill,0,1\n2.png,,0,?\n")
    here = Site(
        name="a",
        csv=tmp_path / "labels.csv",
        images=tmp_path,
        state_dir=tmp_path / "state",
        class_renames=(("note", "remark"),),
    )
    texts = check_site(here).texts("warning")
    assert any(text.startswith("'remark' is text, not labels: 2 cells are not 1, 0 or blank.") for text in texts)
    assert any(text.startswith("'dog' has text among its labels: 1 cells are not 1, 0 or blank.") for text in texts)
    assert not any("blank in every row" in text for text in texts)


@pytest.mark.timeout(60)
def test_hundred_thousand_columns_are_read_and_checked(tmp_path: Path) -> None:
    """A quadratic check of the names takes minutes."""
    classes = 100_000
    rows = [f"{row}.png," + ",".join("10"[(row + column) % 2] for column in range(classes)) for row in range(6)]
    header = "image," + ",".join(f"class {column}" for column in range(classes))
    table = table_of(tmp_path, "\n".join([header, *rows]) + "\n")
    assert table.labels.shape == (6, classes)
    for number in range(6):
        Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) + np.uint8(number)).save(tmp_path / f"{number}.png")
    here = Site(name="a", csv=tmp_path / "labels.csv", images=tmp_path, state_dir=tmp_path / "state")
    summary = check_site(here).summary
    assert summary is not None and len(summary.classes) == classes
    chosen = ReadingOptions(classes=table.classes)
    assert read_labels(tmp_path / "labels.csv", tmp_path, chosen).classes == table.classes


def test_error_about_many_text_columns_is_short(tmp_path: Path) -> None:
    names = [f"note {number}" for number in range(1000)]
    text = "image,cat," + ",".join(names) + "\n" + "".join(f"{row}.png,1{',x' * 1000}\n" for row in range(3))
    found = report(table_of(tmp_path, text))
    assert "Name the columns that are classes with data.classes." in found and len(found) < 1000
    wrong = ReadingOptions(classes=tuple(f"c{number}" for number in range(1000)))
    found = report(table_of(tmp_path, text, wrong))
    assert "data.classes names 995 more that are not columns." in found and len(found) < 2000
