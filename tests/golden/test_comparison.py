"""Tests of the comparison of golden runs, on made-up results."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.golden import __main__ as command
from tests.golden.__main__ import CHANGES
from tests.golden.cases import Case
from tests.golden.compare import Changes, Entry, compare
from tests.golden.runner import Result, parse, unparse

RESULT: Result = {
    "exit": [0],
    "message": [""],
    "runs": {
        "run": {
            "command": {"": ["fedloom", "run", "fedavg"], "--per-round": "4", "--engine": "plain"},
            "config": {"per_round": 4, "engine": "plain", "options.fedavg.server_lr": 1.0},
            "metrics": [
                {"round": 0, "accuracy": 0.1},
                {"round": 1, "accuracy": 0.5, "lost": 0, "diagnostics.local.drift": 0.25, "seconds.total": "time"},
            ],
            "summary": {"lost": 0},
            "digest": "aa",
            "weights": "bb",
            "files": ["config.toml"],
        }
    },
    "written": {"parts.json": "cc"},
    "draws": {"0|select|0|0": 1, "0|batches|0|3": 1},
}


def changed(**places: Any) -> Result:
    """RESULT with other values: `runs__run__digest="dd"`; None takes the key out."""
    result = copy.deepcopy(RESULT)
    for place, value in places.items():
        *way, last = place.split("__")
        inner: Any = result
        for step in way:
            inner = inner[int(step)] if isinstance(inner, list) else inner[step]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return result


def listed(new: Result, *entries: tuple[str, dict[str, Any]], case: str = "fedavg/norm/plain") -> list[str]:
    """What a comparison with RESULT finds, with these entries in the table, and which of them nothing needs."""
    changes = Changes([Entry(kind, values) for kind, values in entries])
    found = [str(difference) for difference in compare(case, RESULT, new, changes)]
    return found + [f"unused: {entry}" for entry in changes.unused()]


def test_equal_results_do_not_differ() -> None:
    assert listed(copy.deepcopy(RESULT)) == []


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"runs__run__digest": "dd"}, "run: digest is 'dd', not 'aa'"),
        ({"runs__run__weights": "dd"}, "run: weights is 'dd', not 'bb'"),
        ({"runs__run__files": []}, "run: files is [], not ['config.toml']"),
        ({"runs__run__metrics__1__accuracy": 0.25}, "run, record 1: metrics.accuracy is 0.25, not 0.5"),
        ({"runs__run__metrics__1__accuracy": None}, "run, record 1: metrics.accuracy is nothing, not 0.5"),
        ({"runs__run__metrics__1__new": 0}, "run, record 1: metrics.new is 0, not nothing"),
        ({"runs__run__metrics__1__lost": 0.0}, "run, record 1: metrics.lost is 0.0, not 0"),
        ({"runs__run__metrics__1__lost": False}, "run, record 1: metrics.lost is False, not 0"),
        ({"runs__run__metrics": RESULT["runs"]["run"]["metrics"][:1]}, "run: metrics is '1 records', not '2 records'"),
        ({"runs__run__config__per_round": 5}, "run: config.per_round is 5, not 4"),
        ({"runs__run__command__--engine": "host"}, "run: command.--engine is 'host', not 'plain'"),
        ({"runs__run__summary__lost": 1}, "run: summary.lost is 1, not 0"),
        ({"draws__0|select|0|0": 2}, "draws.0|select|0|0 is 2, not 1"),
        ({"draws__0|lost|0|3": 1}, "draws.0|lost|0|3 is 1, not nothing"),
        ({"draws__0|batches|0|3": None}, "draws.0|batches|0|3 is nothing, not 1"),
        ({"exit": [1]}, "exit.0 is 1, not 0"),
        ({"exit": [0, 0]}, "exit.1 is 0, not nothing"),
        ({"message": ["fedloom: no."]}, "message.0 is 'fedloom: no.', not ''"),
        ({"runs__run": None}, "run: runs is nothing, not 'a run'"),
        ({"written__parts.json": "dd"}, "written.parts.json is 'dd', not 'cc'"),
    ],
)
def test_each_thing_that_differs_is_listed(places: dict[str, Any], expected: str) -> None:
    assert listed(changed(**places)) == [expected]


def test_several_differences_are_all_listed() -> None:
    new = changed(runs__run__digest="dd", exit=[1], runs__run__config__per_round=5)
    assert len(listed(new)) == 3


RENAMED = ("renamed", {"where": "metrics", "old": "lost", "new": "failed"})


def renamed_metrics(**more: Any) -> Result:
    places = {"runs__run__metrics__1__lost": None, "runs__run__metrics__1__failed": 0}
    return changed(**{**places, **more})


def test_a_renamed_key_is_one_key() -> None:
    assert listed(renamed_metrics(), RENAMED) == []
    assert listed(renamed_metrics()) == [
        "run, record 1: metrics.failed is 0, not nothing",
        "run, record 1: metrics.lost is nothing, not 0",
    ]


def test_a_renamed_key_keeps_its_value_and_its_place() -> None:
    new = renamed_metrics(runs__run__metrics__1__failed=2)
    assert listed(new, RENAMED) == ["run, record 1: metrics.failed is 2, not 0"]
    in_summary = ("renamed", {"where": "summary", "old": "lost", "new": "failed"})
    assert [line.partition(" is ")[0] for line in listed(renamed_metrics(), in_summary)] == [
        "run: summary.failed",
        "run: summary.lost",
        "run, record 1: metrics.failed",
        "run, record 1: metrics.lost",
    ]


def test_a_star_renames_the_beginning_of_keys() -> None:
    entry = ("renamed", {"where": "metrics", "old": "diagnostics.local.*", "new": "diagnostics.client.*"})
    places = {
        "runs__run__metrics__1__diagnostics.local.drift": None,
        "runs__run__metrics__1__diagnostics.client.drift": 0.25,
    }
    assert listed(changed(**places), entry) == []


def test_a_value_has_another_name_there_alone() -> None:
    entry = ("value", {"where": "config", "key": "engine", "old": "plain", "new": "sequential"})
    assert listed(changed(runs__run__config__engine="sequential"), entry) == []
    both = changed(**{"runs__run__config__engine": "sequential", "runs__run__command__--engine": "sequential"})
    assert listed(both, entry) == ["run: command.--engine is 'sequential', not 'plain'"]
    assert listed(changed(runs__run__config__engine="host"), entry) == [
        "run: config.engine is 'host', not 'sequential'"
    ]


def test_a_removed_key_must_be_gone() -> None:
    entry = ("removed", {"where": "config", "key": "engine"})
    assert listed(changed(runs__run__config__engine=None), entry) == []
    assert listed(copy.deepcopy(RESULT), entry) == ["run: config.engine is 'plain', not nothing"]


def test_a_key_can_be_removed_where_it_had_one_value() -> None:
    gone = changed(runs__run__config__engine=None)
    assert listed(gone, ("removed", {"where": "config", "key": "engine", "old": "plain"})) == []
    other = ("removed", {"where": "config", "key": "engine", "old": "host"})
    assert listed(gone, other)[0] == "run: config.engine is nothing, not 'plain'"


@pytest.mark.parametrize(("value", "fine"), [(False, True), (True, False)])
def test_an_added_key_has_the_value_that_the_table_says(value: bool, fine: bool) -> None:
    entry = ("added", {"where": "config", "key": "ema", "value": False})
    assert (listed(changed(runs__run__config__ema=value), entry) == []) is fine
    assert listed(copy.deepcopy(RESULT), entry) == ["run: config.ema is nothing, not False"]


def test_an_added_key_may_have_any_value() -> None:
    entry = ("added", {"where": "summary", "key": "seconds_of_cpu"})
    assert listed(changed(runs__run__summary__seconds_of_cpu=3), entry) == []


@pytest.mark.parametrize(("beside", "found"), [("engine", ["run: config.ema is nothing, not False"]), ("mu", [])])
def test_an_added_key_is_asked_for_beside_another(beside: str, found: list[str]) -> None:
    entry = ("added", {"where": "config", "key": "ema", "value": False, "beside": beside})
    assert [said for said in listed(copy.deepcopy(RESULT), entry) if not said.startswith("unused")] == found


def test_changed_bits_are_excused_in_their_cases_alone() -> None:
    entry = ("changed", {"cases": ["fedcda/*"], "what": ["digest", "metrics.accuracy"]})
    new = changed(runs__run__digest="dd", runs__run__metrics__1__accuracy=0.25)
    assert listed(new, entry, case="fedcda/norm/host") == []
    assert len(listed(new, entry)) == 3  # two differences, and an entry that nothing needs
    more = changed(runs__run__digest="dd", runs__run__weights="ee")
    assert listed(more, entry, case="fedcda/norm/host") == ["run: weights is 'ee', not 'bb'"]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("renamed", {"where": "metrics", "old": "gone", "new": "away"}),
        ("value", {"where": "config", "key": "engine", "old": "cuda", "new": "gpu"}),
        ("removed", {"where": "config", "key": "gone"}),
        ("changed", {"cases": ["*"], "what": ["digest"]}),
    ],
)
def test_an_entry_that_nothing_needs_is_listed(kind: str, values: dict[str, Any]) -> None:
    assert listed(copy.deepcopy(RESULT), (kind, values)) == [f"unused: {Entry(kind, values)}"]


@pytest.mark.parametrize(
    ("entries", "new", "everything", "code", "told"),
    [
        ([], RESULT, True, 0, "1 cases as "),
        ([], changed(runs__run__digest="dd"), True, 1, "a/b:\n    run: digest is 'dd', not 'aa'\n"),
        ([Entry(*RENAMED)], renamed_metrics(), True, 0, "1 cases as "),
        ([Entry(*RENAMED), Entry("removed", {"where": "config", "key": "x"})], renamed_metrics(), True, 1, "key = 'x'"),
        ([Entry("removed", {"where": "config", "key": "x"})], RESULT, False, 0, "1 cases as "),
    ],
)
def test_the_command_ends_with_an_error_where_something_differs_or_an_entry_is_left_over(
    entries: list[Entry],
    new: Result,
    everything: bool,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "_old", lambda cases: {case.name: RESULT for case in cases})
    monkeypatch.setattr(command, "_play", lambda tree, cases, changes: [(case.name, new) for case in cases])
    fresh = Changes([Entry(entry.kind, entry.values) for entry in entries])
    assert command.hold([Case("a/b", ())], fresh, everything) == code
    assert told in capsys.readouterr().out


def test_commands_are_translated_word_by_word() -> None:
    words = ["run", "fedcda", "--per-round", "4", "--quiet", "--set", "fedcda.K=2", "--set", "fedcda.time_limit=1"]
    assert unparse(parse(words)) == words
    changes = Changes(
        [
            Entry("renamed", {"where": "command", "old": "--per-round", "new": "--clients-per-round"}),
            Entry("renamed", {"where": "command", "old": "--set fedcda.K", "new": "--set fedcda.cache_size"}),
            Entry("removed", {"where": "command", "key": "--set fedcda.time_limit"}),
            Entry("added", {"where": "command", "key": "--never", "value": "1"}),
        ]
    )
    expected = ["run", "fedcda", "--clients-per-round", "4", "--quiet", "--set", "fedcda.cache_size=2"]
    assert changes.command(words) == expected


@pytest.mark.parametrize(
    "text",
    [
        '[[renamd]]\nwhere = "config"\nold = "a"\nnew = "b"\nwhy = "c"',
        '[[renamed]]\nwhere = "config"\nold = "a"\nnew = "b"',
        '[[renamed]]\nwhere = "draws"\nold = "a"\nnew = "b"\nwhy = "c"',
        '[[removed]]\nwhere = "config"\nkey = "a"\nvalue = 1\nwhy = "c"',
    ],
)
def test_a_table_that_is_not_understood_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(text)
    with pytest.raises(ValueError, match=r"changes\.toml: "):
        Changes.read(tmp_path / "changes.toml")


def test_the_table_of_the_repository_is_understood() -> None:
    assert all(entry.values["why"] for entry in Changes.read(CHANGES).entries)
