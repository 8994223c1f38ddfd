"""Absolute paths become file names, and paths that differ stay different."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report import RunRecord
from fedloom.report.file_names import hide_folders, hide_record_folders, hide_setting_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("table:/home/me/people.csv,label=income", "table:people.csv,label=income"),
        ("table:/a b/c d.csv,test=/x/y.csv", "table:c d.csv,test=y.csv"),
        ("/data/start.pt", "start.pt"),
        ("/start.pt", "start.pt"),
        ("dirichlet:0.3", "dirichlet:0.3"),
        ("a/b", "a/b"),
        ("1/2,3/4", "1/2,3/4"),
    ],
)
def test_settings(text, shown):
    assert hide_setting_folders(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file: '/home/of me/x.npz'", "no file: 'x.npz'"),
        ("cannot read /home/me/x.npz: full", "cannot read x.npz: full"),
        (
            "at 3 images/s and/or 1/2, see https://example.org/a/b",
            "at 3 images/s and/or 1/2, see https://example.org/a/b",
        ),
        ("client / server", "client / server"),
        ("results/rounds.json", "results/rounds.json"),
    ],
)
def test_other_texts(text, shown):
    assert hide_folders(text) == shown


PATHS = st.lists(st.sampled_from(["a", "b c", "d.csv"]), min_size=1, max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)


@given(st.lists(PATHS, min_size=1, max_size=6))
def test_paths_that_differ_stay_different_and_none_is_absolute(paths):
    records = [RunRecord(Path("r"), {"data": f"table:{path},label=y", "imports": [path]}) for path in paths]
    shown = [record.config["data"] for record in hide_record_folders(records)]
    assert len(set(shown)) == len(set(paths))
    for path, text, record in zip(paths, shown, hide_record_folders(records), strict=True):
        name = text.removeprefix("table:").removesuffix(",label=y")
        assert not name.startswith("/")
        assert path.endswith(f"/{name}")
        assert record.config["imports"] == [name]


def test_a_file_in_one_folder_only_is_named_alone():
    records = [RunRecord(Path("r"), {"data": f"table:/x/{at}/people.csv", "init": "/x/start.pt"}) for at in (1, 1)]
    assert hide_record_folders(records)[0].config == {"data": "table:people.csv", "init": "start.pt"}
