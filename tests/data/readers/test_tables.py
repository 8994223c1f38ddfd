"""Tests of tables: numbers, words, missing values, labels and owners."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedloom.data import Dataset, load_dataset
from fedloom.data.dataset import NO_OWNER
from fedloom.data.readers.columns import read_csv_columns
from fedloom.errors import InputError

PEOPLE = """age,job,income,site
20,cook,low,b
40,nurse,high,a
,cook,low,a
60,NA,high,b
40,clerk,low,a
20,cook,high,b
"""


def put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def table(path: Path, text: str, options: str = "label=income") -> Dataset:
    return load_dataset(f"table:{put(path / 'people.csv', text)},{options}")


def rows_of(count: int, owners: int = 4) -> str:
    rng = np.random.default_rng(count)
    lines = [
        f"{rng.normal():.3f},{'xyz'[int(rng.integers(3))]},{int(rng.integers(2))},o{k % owners}" for k in range(count)
    ]
    return "\n".join(["value,word,income,site", *lines]) + "\n"


def test_numbers_are_standardised_and_words_one_hot(tmp_path: Path) -> None:
    test = put(tmp_path / "more.csv", "site,age,job,income\nz,80,cook,high\nz,40,baker,low\nz,,,low\n")
    data = table(tmp_path, PEOPLE, f"label=income,owner=site,test={test}")
    assert data.class_names == ("high", "low")
    assert data.train.y.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.owner_names == ("a", "b")
    assert data.owners is not None
    assert data.owners.tolist() == [1, 0, 0, 1, 0, 1]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [NO_OWNER] * 3, "z has no training rows"
    ages = np.array([20, 40, 60, 40, 20])
    mean, std = ages.mean(), ages.std()
    expected = [[(age - mean) / std for age in (20, 40, mean, 60, 40, 20)]]
    expected += [[0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0]]  # clerk, cook, nurse
    torch.testing.assert_close(data.train.x, torch.tensor(expected).T.float())
    torch.testing.assert_close(
        data.test.x, torch.tensor([[(80 - mean) / std, 0, 1, 0], [(40 - mean) / std, 0, 0, 0], [0, 0, 0, 0]]).float()
    )
    assert (data.shape, data.classes) == ((4,), 2)
    assert any("people.csv: 2 missing values" in note for note in data.notes)
    assert any("more.csv: 2 missing values" in note for note in data.notes)
    assert any("more.csv: 1 words that no training row has" in note for note in data.notes)
    assert any("columns of numbers: 1," in note and "of words: 1," in note for note in data.notes)
    assert any(note.endswith("inputs: 4.") for note in data.notes)
    assert not any("read as words" in note for note in data.notes)


def test_the_column_of_labels_may_be_called_label(tmp_path: Path) -> None:
    put(tmp_path / "people.csv", PEOPLE.replace("income", "label"))
    named, short = (load_dataset(f"{kind}{tmp_path / 'people.csv'}") for kind in ("table:", ""))
    assert named.class_names == short.class_names == ("high", "low")
    assert np.array_equal(named.train.x.numpy(), short.train.x.numpy())


def test_only_training_rows_are_learnt_from(tmp_path: Path) -> None:
    """A test row that is far away moves no mean."""
    test = put(tmp_path / "more.csv", "age,job,income,site\n1e6,pilot,high,a\n")
    data = table(tmp_path, PEOPLE, f"label=income,owner=site,test={test}")
    assert float(data.train.x[:, 0].mean()) == pytest.approx(0, abs=1e-6)
    assert data.shape == (4,)
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [0]


def test_a_share_of_every_owner_is_for_testing_always_the_same(tmp_path: Path) -> None:
    data = table(tmp_path, rows_of(40), "label=income,owner=site,test=0.3")
    assert data.owners is not None
    assert np.bincount(data.owners).tolist() == [7] * 4
    assert len(data.test) == 12
    assert data.test_owners is not None
    assert np.bincount(data.test_owners).tolist() == [3] * 4
    again = table(tmp_path, rows_of(40), "label=income,owner=site,test=0.3")
    assert torch.equal(again.test.x, data.test.x)
    alone = table(tmp_path, rows_of(40), "label=income,drop=site")
    assert (len(alone.train), len(alone.test), alone.owners) == (32, 8, None)


def test_owners_may_be_numbers_and_stay_in_their_order(tmp_path: Path) -> None:
    text = "x,y,who\n" + "".join(f"{i},{i % 2},{(10, 9, 2)[i % 3]}\n" for i in range(12))
    data = table(tmp_path, text, "label=y,owner=who")
    assert data.owner_names == ("2", "9", "10")
    assert data.class_names == ("0", "1")


def test_labels_that_are_no_whole_numbers_are_a_regression(tmp_path: Path) -> None:
    text = "x,price\n" + "".join(f"{i},{i}.5\n" for i in range(10))
    data = table(tmp_path, text, "label=price")
    assert (data.classes, data.class_names) == (0, ())
    assert data.train.y.dtype == torch.float32
    assert data.train.y.shape == (8, 1)
    joined = sorted(data.train.y.flatten().tolist() + data.test.y.flatten().tolist())
    assert joined == [i + 0.5 for i in range(10)]


def test_the_task_can_be_said(tmp_path: Path) -> None:
    text = "x,y\n" + "".join(f"{i},{i % 3}\n" for i in range(12))
    assert table(tmp_path, text, "label=y,task=regression").classes == 0
    floats = text.replace(",0\n", ",0.0\n").replace(",1\n", ",1.0\n").replace(",2\n", ",2.0\n")
    assert table(tmp_path, floats, "label=y").classes == 0
    assert table(tmp_path, floats, "label=y,task=classification").class_names == ("0.0", "1.0", "2.0")
    many = "x,y\n" + "".join(f"{i},{i}\n" for i in range(1001))
    with pytest.raises(InputError, match="1001 different whole numbers as labels; say task=regression or task="):
        table(tmp_path, many, "label=y")
    assert table(tmp_path, many, "label=y,task=regression").classes == 0


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    data = table(tmp_path, rows_of(20) + "1,x,,o1\n2,y,NA,o2\n", "label=income")
    assert len(data.train) + len(data.test) == 20
    assert data.notes[0] == "people.csv: 2 rows without a label were left out."


def test_columns_that_never_change_or_are_empty(tmp_path: Path) -> None:
    text = "same,none,big,y\n" + "".join(f"0.1,,{1e300 * (i - 3)},{i % 2}\n" for i in range(8))
    data = table(tmp_path, text, "label=y")
    assert data.shape == (2,)
    assert bool(torch.isfinite(data.train.x).all())
    assert float(data.train.x[:, 0].abs().max()) < 1e-6
    assert any("left out, for all values are missing: none" in note for note in data.notes)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_quotes_marks_and_gzip(tmp_path: Path, separator: str) -> None:
    content = f'\ufeffa{separator}"b c"\r\n1{separator}"x{separator}""y""\r\nz"\r\n\r\n2{separator}w\r\n'
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(content.encode()))
    columns = read_csv_columns(path)
    assert list(columns) == ["a", "b c"]
    assert np.array_equal(columns["a"], [1, 2])
    assert columns["b c"] == [f'x{separator}"y"\r\nz', "w"]


@pytest.mark.parametrize("text", ["1_000", "0x10", "1,5", "١", "inf", "1e", "--1", "1-1", ".", "1 2"])
def test_what_is_no_plain_number_is_a_word(tmp_path: Path, text: str) -> None:
    columns = read_csv_columns(put(tmp_path / "t.csv", f'x;y\n"{text}";1\n'))
    assert columns["x"] == [text]


@pytest.mark.parametrize("slip", ["4O", "inf", "1_000"])
def test_what_makes_words_of_numbers_is_named(tmp_path: Path, slip: str) -> None:
    rows = "".join(f"{i}.5,{i % 2}\n" for i in range(900))
    assert (
        f"people.csv: column 'x' was read as words, for '{slip}' is no number."
        in table(tmp_path, f"x,y\n{rows}{slip},1\n2.5,0\n", "label=y,test=0.01").notes
    )
    many = "".join(f"{i}.5,{i % 2}\n" for i in range(2000))
    with pytest.raises(InputError, match=rf"too many to be categories \('{slip}' is no number\); leave it out"):
        table(tmp_path, f"x,y\n{many}{slip},1\n2.5,0\n", "label=y,test=0.01")


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="infinite value in column 'x'"):
        table(tmp_path, "x,y\n" + "".join(f"1e400,{i % 2}\n" for i in range(6)), "label=y")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            PEOPLE,
            "owner=site",
            r"has no column 'label'; name the column of labels, as in people.csv,label=NAME. Its columns: age, ",
        ),
        (PEOPLE, "label=incom", "unknown column of .* 'incom'; did you mean 'income'"),
        (PEOPLE, "label=income,owner=who", "unknown column of .* 'who'"),
        (PEOPLE, "label=income,drop=job+agee", "'agee'; did you mean 'age'"),
        (PEOPLE, "label=income,test=1.5", "expected a file, or a share above 0 and below 1"),
        (PEOPLE, "label=income,test=gone.csv", r"cannot read .*gone\.csv: No such file"),
        (PEOPLE, "label=income,task=ranking", "unknown task 'ranking'"),
        (PEOPLE, "label=job,task=regression", "has the label 'cook'; a regression wants numbers"),
        (PEOPLE, "label=income,drop=age+job+site", "no column to learn from"),
        (PEOPLE, "label=income,lable=x", "unknown option of 'table' 'lable'; did you mean 'label'"),
        ("", "label=income", "is empty; expected names of columns"),
        ("a,income\n", "label=income", "no rows below its first line"),
        ("a,a,income\n1,2,3\n", "label=income", "two columns called 'a'"),
        ("a,income\n1,x\n1\n", "label=income", "line 3 of .* has 1 fields; expected 2"),
        ('a,income\n"1,x\n', "label=income", "line 2 of .* cannot be read"),
        ("a,income\n1,x\n2,x\n", "label=income", "only the label 'x'"),
        ("a,income\n1,\n2,\n", "label=income", "no row with a label"),
        ("a,income,who\n1,x,k\n2,y,\n", "label=income,owner=who", "whose row 2 is: 'who' is missing"),
        ("a,income\n1,x\n", "label=income,test=0.1", "only the label|too few rows"),
        (f"a,income\n{'x' * 200_000},1\n", "label=income", "line 2 of .* field larger than field limit"),
        ("a,income\n" + "".join(f"w{i},{i % 2}\n" for i in range(2000)), "label=income", "leave it out with drop=a"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, options: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        table(tmp_path, text, options)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("age,job,income\n1,cook,none-such\n", "has the label 'none-such', which no training row has"),
        ("age,income\n1,low\n", "has no column 'job'"),
        ("age,job\n1,cook\n", "unknown column of .* 'income'"),
        ("age,job,income\nold,cook,low\n", "'old' in column 'age', which holds numbers"),
    ],
)
def test_test_tables_that_do_not_fit(tmp_path: Path, test: str, message: str) -> None:
    put(tmp_path / "more.csv", test)
    with pytest.raises(InputError, match=message):
        table(tmp_path, PEOPLE, f"label=income,drop=site,test={tmp_path / 'more.csv'}")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(PEOPLE.encode())[:-12])
    for name, message in (("bytes.csv", "not UTF-8"), ("cut.csv.gz", "cannot read"), ("", "is a folder")):
        with pytest.raises(InputError, match=message):
            load_dataset(f"table:{tmp_path / name},label=b")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=4), max_size=6), st.booleans())
@example([["y"], ["\0"]], False)
@example([["a", "y"], ["1", "0"], ["\r", "1"], ["2", "0"]], True)
def test_any_table_is_read_or_refused(tmp_path: Path, rows: list[list[str]], quote: bool) -> None:
    path = tmp_path / "any.csv"
    with path.open("w", encoding="utf-8", newline="", errors="surrogatepass") as file:
        if quote:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
        else:
            file.write("\n".join(",".join(row) for row in rows))
    label = (rows[0][-1] if rows else "").strip() or "y"
    try:
        data = load_dataset(f"table:{path},label={label},test=0.5")
    except InputError:
        return
    assert len(data.train) >= 1
    assert len(data.train) + len(data.test) <= len(rows) * 8
    assert bool(torch.isfinite(data.train.x).all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_tables_are_refused_or_consistent(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(rows_of(12).encode())
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "t.csv").write_bytes(bytes(damaged))
    try:
        found = load_dataset(f"table:{tmp_path / 't.csv'},label=income,owner=site")
    except InputError:
        return
    assert found.owners is not None
    assert len(found.owners) == len(found.train)
    assert bool(torch.isfinite(found.train.x).all())
    if found.classes:
        assert int(found.train.y.max()) < found.classes == len(found.class_names)


class TestParquet:
    """The same from Parquet files."""

    def write(self, path: Path, columns: dict[str, Any]) -> Path:
        arrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.table(columns), path)
        return path

    def test_it_is_read_as_a_csv_would_be(self, tmp_path: Path) -> None:
        put(tmp_path / "people.csv", PEOPLE)
        columns = {
            "age": [20, 40, None, 60, 40, 20],
            "job": ["cook", "nurse", "cook", None, "clerk", "cook"],
            "income": ["low", "high", "low", "high", "low", "high"],
            "site": list("baabab"),
        }
        self.write(tmp_path / "people.parquet", columns)
        ours, theirs = (
            load_dataset(f"table:{tmp_path / f'people.{kind}'},label=income,owner=site") for kind in ("parquet", "csv")
        )
        assert torch.equal(ours.train.x, theirs.train.x)
        assert torch.equal(ours.test.y, theirs.test.y)
        assert ours.owner_names == theirs.owner_names

    def test_types_say_what_labels_are(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        base = {"x": list(range(8)), "flag": [True, False] * 4}
        floats = self.write(tmp_path / "a.parquet", {**base, "y": [float(i % 2) for i in range(8)]})
        assert load_dataset(f"table:{floats},label=y").classes == 0
        assert load_dataset(f"table:{floats},label=flag").class_names == ("False", "True")
        whole = self.write(tmp_path / "b.parquet", {**base, "y": [i % 2 for i in range(8)]})
        assert load_dataset(f"table:{whole},label=y").shape == (2,)

    def test_lists_and_dates_are_refused_by_name(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", {"x": [[1], [2]], "z": [1, 2], "y": [0, 1]})
        with pytest.raises(InputError, match=r"values of type list<.*> in column 'x'; leave it out with drop=x"):
            load_dataset(f"table:{path},label=y")

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", {"x": [1, 2, 3], "y": [0, 1, 0]})
        whole = path.read_bytes()
        for content in (
            b"",
            whole[:-1],
            whole[: len(whole) // 2],
            whole[:-8] + b"\xff\xff\xff\x7fPAR1",
            PEOPLE.encode(),
        ):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"a\.parquet is truncated or broken"):
                load_dataset(f"table:{path},label=y")

    def test_without_pyarrow_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = put(tmp_path / "a.parquet", "anything")
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(InputError, match=r"only be read with pyarrow: pip install 'fedloom\[tables\]'"):
            load_dataset(f"table:{path},label=y")


def test_named_columns_are_refused_where_they_are_dropped_and_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="drops 'income', which it also names as label or owner"):
        table(tmp_path, PEOPLE, "label=income,drop=income")
