"""Tests that a data set is decoded once, and again if damaged or out of date."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.data.cache import load_through_cache
from fedloom.data.dataset import Dataset
from fedloom.data.readers.images import LARGE, _allocate_images
from fedloom.errors import InputError
from fedloom.utils.data_folders import cache_folder
from tests.support.cache_content import content, same


class Reader:
    """A place with source files, and how often it was read."""

    def __init__(self, root: Path) -> None:
        self.place, self.reads, self.seed = root / "source", 0, 0
        self.place.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (self.place / name).write_text(name)

    def make(self) -> Dataset:
        self.reads += 1
        return content(self.seed)

    def get(self, recipe: str = "set 1") -> Dataset:
        return load_through_cache("set", self.place, recipe, sorted(self.place.iterdir()), self.make)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return Reader(tmp_path)


def test_what_was_decoded_is_mapped_and_not_decoded_again(reader: Reader) -> None:
    for _ in range(3):
        assert same(reader.get(), content())
    assert reader.reads == 1
    maps = Path("/proc/self/maps")
    found = reader.get()
    if maps.exists():
        assert "train.x.npy" in maps.read_text()
    found.train.x.zero_()  # in this process only
    assert same(reader.get(), content())


def test_changed_files_and_recipes_are_decoded_again(reader: Reader) -> None:
    reader.get()
    reader.seed = 1
    os.utime(reader.place / "a", ns=(1, 1))
    assert same(reader.get(), content(1))
    reader.seed = 2
    (reader.place / "b").write_text("longer")
    assert same(reader.get(), content(2))
    (reader.place / "b").rename(reader.place / "c")
    reader.get()
    assert reader.reads == 4
    entries = list((cache_folder() / "decoded").iterdir())
    assert len(entries) == 1
    assert len(list(entries[0].iterdir())) == 1, "what is out of date goes"
    reader.get("set 2")
    assert reader.reads == 5
    reader.get()
    assert reader.reads == 5


def test_what_cannot_be_read_leaves_nothing(reader: Reader) -> None:
    def fail() -> Dataset:
        raise InputError("a is broken.")

    with pytest.raises(InputError, match="a is broken"):
        load_through_cache("set", reader.place, "set 1", [reader.place / "a"], fail)
    with pytest.raises(InputError, match=r"cannot read .*absent: No such file"):
        load_through_cache("set", reader.place, "set 1", [reader.place / "absent"], fail)
    assert same(reader.get(), content())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20), st.none() | st.floats(0, 1, exclude_max=True))
def test_a_damaged_entry_is_made_again(reader: Reader, number: int, cut: float | None) -> None:
    reader.get()
    (entry,) = (cache_folder() / "decoded").glob("*/*")
    names = sorted(path.name for path in entry.iterdir())
    path = entry / names[number % len(names)]
    whole = path.read_bytes()
    if cut is not None:
        path.write_bytes(whole[: int(cut * len(whole))])
    else:
        path.unlink()
    before = reader.reads
    assert same(reader.get(), content())
    assert reader.reads == before + 1
    assert same(reader.get(), content())
    assert reader.reads == before + 1


WORKER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.cache_content import content, same
from fedloom.data.cache import load_through_cache
place = Path(sys.argv[2])
def make():
    with (place.parent / "made").open("a") as log:
        log.write("made\\n")
    time.sleep(0.5)
    if len(sys.argv) > 3:
        os._exit(9)
    return content()
(place.parent / f"ready-{os.getpid()}").touch()
while not (place.parent / "go").exists():
    time.sleep(0.001)
assert same(load_through_cache("set", place, "set 1", [place / "a"], make), content())
"""


def start(reader: Reader, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(Path(__file__).parents[2]), str(reader.place), *more])


def test_processes_that_start_at_once_decode_once_and_all_get_it(reader: Reader, tmp_path: Path) -> None:
    workers = [start(reader) for _ in range(3)]
    while len(list(tmp_path.glob("ready-*"))) < len(workers) and all(worker.poll() is None for worker in workers):
        pass
    (tmp_path / "go").touch()
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_process_that_is_killed_holds_nobody_up(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    assert start(reader, "die").wait(60) == 9
    (entry,) = (cache_folder() / "decoded").iterdir()
    (entry / ".new-left").mkdir()
    assert start(reader).wait(60) == 0
    assert (tmp_path / "made").read_text() == "made\nmade\n"
    assert not list(entry.glob(".new-*"))


def test_a_cache_that_cannot_be_written_is_done_without(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = reader.place / "a"
    monkeypatch.setenv("FEDLOOM_CACHE", str(occupied))
    with pytest.warns(UserWarning, match=r"could not be kept in .*a: Not a directory"):
        assert same(reader.get(), content())


def test_large_arrays_are_decoded_into_a_file(reader: Reader) -> None:
    assert isinstance(_allocate_images((LARGE + 1, 1)), np.memmap)
    assert not isinstance(_allocate_images((10, 1)), np.memmap)
    assert not list(cache_folder().iterdir()), "which has no name"


def test_owners_must_fit_the_samples() -> None:
    whole = content()
    with pytest.raises(InputError, match=r"30 training samples have owners of shape \(29,\)"):
        Dataset(whole.train, whole.test, ("a",), np.zeros(29, np.int64), ("me",))
    with pytest.raises(InputError, match="domains run from 0 to 1, but 1 have a name"):
        Dataset(whole.train, whole.test, ("a",), domains=np.arange(30) % 2, domain_names=("here",))
