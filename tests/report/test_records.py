"""Tests of reading run directories, and of grouping runs over seeds."""

import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.report import RunRecord, read_run_record
from fedloom.utils.storage import write_json
from tests.support.fake_runs import write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", "fedcross", seed=4)


def test_a_run_is_read_whole(folder):
    record = read_run_record(folder)
    assert (record.method, record.seed, record.finished, record.last_round) == ("fedcross", "4", True, 40)
    assert record.counts is not None
    assert record.counts.shape == (20, 10)
    rounds, values = record.series("accuracy")
    assert rounds.tolist() == list(range(0, 41, 2))
    assert values[0] < values[-1]
    assert record.series("seconds.train")[0].tolist() == list(range(1, 41))


def test_a_torn_last_line_is_ignored_while_a_run_has_not_finished(folder):
    whole = read_run_record(folder).history
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"round": 41, "note": "é'.encode()[:-1])
    with pytest.raises(InputError, match=r"the last line of .*metrics\.jsonl is not complete"):
        read_run_record(folder)
    (folder / "summary.json").unlink()
    assert read_run_record(folder).history == whole


def test_a_run_that_only_started_is_fine(folder):
    for name in ("metrics.jsonl", "summary.json", "partition.json"):
        (folder / name).unlink()
    record = read_run_record(folder)
    assert (record.history, record.summary, record.counts, record.last_round) == ([], None, None, 0)
    assert record.total("bytes_up") is None


@pytest.mark.parametrize("name", ["config.toml", "inputs.json", "metrics.jsonl", "summary.json", "partition.json"])
@pytest.mark.parametrize("place", [0, 0.3, 0.6, 0.999999])
def test_each_flipped_bit_is_found_and_its_file_named(folder, name, place):
    content = bytearray((folder / name).read_bytes())
    at = int(place * len(content))
    for bit in range(8):
        flipped = content.copy()
        flipped[at] ^= 1 << bit
        (folder / name).write_bytes(flipped)
        with pytest.raises(InputError, match=re.escape(name)):
            read_run_record(folder)


@pytest.mark.parametrize("count", [1, 2, 41])
def test_missing_lines_of_a_finished_run_are_found(folder, count):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-count]))
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged: lines are missing at its end"):
        read_run_record(folder)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[count:]))
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
        read_run_record(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "method = "),
        ("metrics.jsonl", '{"round": 0}\n{"rou\n{"round": 2}\n'),
        ("metrics.jsonl", '{"accuracy": 0.5}\n'),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"round": "1"}\n'),
        ("summary.json", "{"),
        ("summary.json", "[]"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(folder, name, text):
    (folder / name).write_text(text)
    refuse(folder, name)


@pytest.mark.parametrize("counts", [[[1, 2], [3]], [[1.5]], [[-1]], [[math.nan]], "many"])
def test_a_partition_of_other_values_is_named(folder, counts):
    write_json(folder / "partition.json", {"counts": counts})
    refuse(folder, "partition.json")


def refuse(folder, name):
    with pytest.raises(InputError) as error:
        read_run_record(folder)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        read_run_record(tmp_path)
    with pytest.raises(InputError, match="is not a run"):
        read_run_record(tmp_path / "nowhere")


def test_what_is_not_a_number_was_not_measured():
    odd = [None, math.nan, math.inf, "0.5", True, 10**400, {"a": 1}]
    history = [{"round": at, "loss": value} for at, value in enumerate([*odd, 0.5])]
    record = RunRecord(folder=None, config={}, history=history)  # type: ignore[arg-type]
    rounds, values = record.series("loss")
    assert (rounds.tolist(), values.tolist()) == ([len(odd)], [0.5])


def test_a_diagnostic_may_have_dots_in_its_name():
    record = RunRecord(None, {}, [{"round": 1, "diagnostics": {"layer.0.norm": 2}}])  # type: ignore[arg-type]
    assert record.series("diagnostics.layer.0.norm")[1].tolist() == [2.0]


@given(costs=st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_running_sums_end_at_the_total(costs):
    history = [{"round": at, "bytes_up": cost} for at, cost in enumerate(costs)]
    record = RunRecord(None, {}, history)  # type: ignore[arg-type]
    running = list(record.running("bytes_up").values())
    assert running[-1] == record.total("bytes_up") == sum(costs)
    assert np.all(np.diff(running) >= 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(name=st.sampled_from(["config.toml", "metrics.jsonl", "summary.json", "partition.json"]), junk=st.binary())
def test_junk_is_read_or_refused_but_never_a_traceback(tmp_path, name, junk):
    if not (tmp_path / "run").exists():
        write_run(tmp_path / "run", rounds=2)
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    path.write_bytes(junk)
    said = ""
    try:
        read_run_record(tmp_path / "run")
    except InputError as error:
        said = str(error)
    path.write_bytes(whole)
    assert "\n" not in said
