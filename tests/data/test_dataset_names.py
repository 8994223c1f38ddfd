"""Tests of data set names with a path and options."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import Config, make_config
from fedloom.data import load_dataset
from fedloom.data.dataset import DatasetSpec, parse_dataset_name
from fedloom.errors import InputError
from fedloom.utils.data_names import complete_data_name


def test_the_parts_of_a_name() -> None:
    spec = parse_dataset_name("table:some/people.csv, label = income,owner=a=b", takes_path=True)
    assert (spec.name, spec.path) == ("table", Path("some/people.csv"))
    assert spec.options == {"label": "income", "owner": "a=b"}
    assert parse_dataset_name("shakespeare:min=3", takes_path=False).options == {"min": "3"}
    assert parse_dataset_name("shakespeare", takes_path=False).options == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("table", "'table' wants a path, as in table:PATH"),
        ("table: ,label=x", "wants a path"),
        ("table:x.csv,label", "cannot read 'label'.* expected KEY=VALUE"),
        ("table:x.csv,label=", "cannot read 'label='"),
        ("table:x.csv,,label=y", "cannot read ''"),
        ("table:x.csv,label=y,label=z", "says label twice"),
        ("table:a\0b.csv,label=y", "zero byte"),
        ("table:x.csv,label=y,test=a\0b.csv", "zero byte"),
    ],
)
def test_names_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_dataset_name(text, takes_path=True)


def spec(**options: str) -> DatasetSpec:
    return DatasetSpec("table", None, options, [])


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "1_0", "٣", "9999999999", "1e3"])
def test_whole_numbers(text: str) -> None:
    assert spec(min="17").integer_option("min", 1, 1) == 17
    with pytest.raises(InputError, match="expected a whole number of at least 1"):
        spec(min=text).integer_option("min", 1, 1)


@pytest.mark.parametrize("text", ["0", "1", "-0.5", "nan", "inf", "x"])
def test_shares(text: str) -> None:
    assert spec(test="0.25").fraction_option("test", 0.1) == 0.25
    with pytest.raises(InputError, match="expected a share above 0 and below 1"):
        spec(test=text).fraction_option("test", 0.1)


def test_yes_and_no() -> None:
    assert spec(lower="yes").yes_no_option("lower")
    assert not spec().yes_no_option("lower")
    with pytest.raises(InputError, match="lower of 'table' is 'maybe'; expected yes or no"):
        spec(lower="maybe").yes_no_option("lower")


def test_an_option_that_nobody_takes() -> None:
    given = spec(lable="x")
    assert given.text_option("label") == ""
    with pytest.raises(InputError, match="unknown option of 'table' 'lable'; did you mean 'label'"):
        given.refuse_unused_options()


@given(st.text(max_size=40))
def test_any_name_is_read_or_refused_in_a_sentence(text: str) -> None:
    for takes_path in (True, False):
        try:
            parsed = parse_dataset_name(f"table:{text}", takes_path)
        except InputError:
            continue
        assert all(parsed.options.values())


def test_paths_in_a_config_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = make_config({"data": "table:d/people.csv,label=income,test=more.csv"})
    assert named.data == f"table:{tmp_path}/d/people.csv,label=income,test={tmp_path}/more.csv"
    assert complete_data_name("table:people.csv,test=0.2") == f"table:{tmp_path}/people.csv,test=0.2"
    assert complete_data_name("sent140:vocabulary=glove.txt,min=3") == f"sent140:vocabulary={tmp_path}/glove.txt,min=3"
    assert complete_data_name(named.data) == named.data
    for plain in ("digits", "shakespeare:file=a.txt", "table:", "hf", "~no-one"):
        assert complete_data_name(plain) == plain
    assert complete_data_name("table:~no-one/x.csv").endswith("/~no-one/x.csv")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mine.csv", "table"),
        ("mine.CSV.gz,label=y", "table"),
        ("some/where/mine.tsv", "table"),
        ("mine.parquet,label=y,owner=site", "table"),
        ("mine.npz", "arrays"),
        ("a b.npz,test=0.1", "arrays"),
        ("photos/", "folder"),
        ("some/photos,size=32", "folder"),
        ("./photos", "folder"),
    ],
)
def test_a_path_alone_gets_its_kind(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete_data_name(name) == complete_data_name(f"{kind}:{name}") == make_config({"data": name}).data
    assert complete_data_name(name).startswith(f"{kind}:{tmp_path}/")


def test_a_path_in_the_home_folder() -> None:
    assert complete_data_name("~/mine.npz") == f"arrays:{Path.home()}/mine.npz"


@pytest.mark.parametrize(
    "name", ["digits", "mnist", "split:0.05", "cifar10:size=3", "photos", "shakespeare:file=a.csv"]
)
def test_other_names_stay(name: str) -> None:
    assert complete_data_name(name) == name


def test_folders_are_called_after_the_data() -> None:
    def called(data: str) -> str:
        return Config(data=data).data_name

    assert called("table:/some/where/people.csv,label=income") == "people"
    assert called("shakespeare:every=10") == "shakespeare"
    assert len(called(f"table:/{'x' * 300}.csv,label=y")) <= 60
    assert "/" not in called("table:/,label=y")


def test_an_unknown_kind() -> None:
    with pytest.raises(InputError, match="unknown data set 'tabel'; did you mean 'table'"):
        load_dataset("tabel:x.csv,label=y")
