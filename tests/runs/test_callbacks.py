"""Tests of callbacks: order of calls, several at once, stops, and errors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import Callback, FedloomError, InputError
from fedloom.cli.progress import ProgressDisplay
from fedloom.config import make_config
from fedloom.errors import RunStopped
from fedloom.runs.callback import CallbackList, combine_callbacks
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.concurrent import PlannedRun, run_concurrently
from fedloom.runs.directory import RunDirectory
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from tests.support.small_runs import TINY_OPTIONS, Command

RUN: dict[str, Any] = {
    "model": "logreg", "clients": 4, "clients_per_round": 2, "rounds": 3, "steps": 1, "engine": "sequential",
    "checkpoint_seconds": 999, "report": False,
}  # fmt: skip
METHODS = (
    "on_run_start", "on_message", "on_round_end", "on_download", "on_server_progress", "should_stop", "check",
    "on_run_end",
)  # fmt: skip


class Log(Callback):
    """Notes each call in a common list."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self._name, self._calls = name, calls

    def __getattribute__(self, method: str) -> Any:
        if method in METHODS:
            self._calls.append((self._name, method))
        return super().__getattribute__(method)


class Fails(Callback):
    """Raises an error in a method when it is called for the n-th time."""

    def __init__(self, method: str, at: int) -> None:
        self.ended = 0
        self._left = at
        setattr(self, method, self._count(getattr(self, method)))

    def _count(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            call(*arguments)
            self._left -= 1
            if not self._left:
                raise KeyError("accuracy")

        return counted

    def on_run_end(self) -> None:
        self.ended += 1


class StopAfter(Callback):
    def __init__(self, round: int) -> None:
        self.reached, self._round = False, round

    def on_round_end(self, record: Any) -> None:
        self.reached = record["round"] >= self._round

    def should_stop(self) -> bool:
        return self.reached


def whole(tmp_path: Path) -> str:
    return fedloom.run("scaffold", **RUN, out=tmp_path / "whole").digest


def checkpoint_rounds(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints").rounds()


def test_every_method_is_called_for_one_callback_after_the_other(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    fedloom.run("fedavg", **RUN | {"rounds": 2}, out=tmp_path / "run", callbacks=[Log("a", calls), Log("b", calls)])
    assert [name for name, _ in calls] == ["a", "b"] * (len(calls) // 2)
    methods = [method for name, method in calls if name == "a"]
    assert methods == [method for name, method in calls if name == "b"]
    round_calls = ["check", "check", "on_round_end", "should_stop"]
    assert methods == ["on_run_start", "on_round_end", *round_calls, *round_calls, "on_run_end"]


def test_the_base_class_has_all_methods_and_does_nothing(tmp_path: Path) -> None:
    assert {name for name in vars(Callback) if not name.startswith("_")} == set(METHODS)
    assert {name for name in vars(CallbackList) if not name.startswith("_")} == set(METHODS)
    run = fedloom.run("scaffold", **RUN, out=tmp_path / "run", callbacks=[Callback(), Callback()])
    assert run.digest == whole(tmp_path)


@pytest.mark.parametrize("seconds", [0, 999])
def test_one_of_several_callbacks_stops_the_run_after_the_round_that_it_saw(seconds: int, tmp_path: Path) -> None:
    """Its checkpoint is written even if none was due. The record is written before the callback gets it."""
    out, seen = tmp_path / "run", list[list[int]]()

    class Reads(Callback):
        def on_round_end(self, record: Any) -> None:
            seen.append([each["round"] for each in RunDirectory.open(out).history()])

    with pytest.raises(RunStopped, match=f"^stopped after round 2; continue with: fedloom resume {out}$"):
        fedloom.run(
            "scaffold",
            **RUN | {"checkpoint_seconds": seconds},
            out=out,
            callbacks=[Callback(), StopAfter(2), StopAfter(9), Reads()],
        )
    assert seen == [[0], [0, 1], [0, 1, 2]]
    assert max(checkpoint_rounds(out)) == 2
    records = RunDirectory.open(out).history()
    assert [record["round"] for record in records] == [0, 1, 2]
    assert "checkpoint" in records[-1]["seconds"]
    assert fedloom.resume(out, report=False).digest == whole(tmp_path)


@pytest.mark.parametrize(
    ("method", "at", "saved", "words"),
    [
        ("on_run_start", 1, [], "; stopped before the first round; continue with: fedloom resume "),
        ("on_round_end", 1, [1], "; stopped after round 1; continue with: fedloom resume "),
        ("on_round_end", 2, [1], "; stopped after round 1; continue with: fedloom resume "),
        ("on_round_end", 3, [2], "; stopped after round 2; continue with: fedloom resume "),
        ("on_round_end", 4, [3], ""),
        ("should_stop", 2, [2], "; stopped after round 2; continue with: fedloom resume "),
        ("check", 4, [2], "; stopped after round 2; continue with: fedloom resume "),
        ("check", 5, [3], ""),
        ("on_run_end", 1, [3], ""),
    ],
)
def test_an_error_of_a_callback_ends_the_run_after_its_round(
    method: str, at: int, saved: list[int], words: str, tmp_path: Path
) -> None:
    out, fails, others = tmp_path / "run", Fails(method, at), [Fails("on_run_end", 99), Fails("on_run_end", 99)]
    message = f"callback Fails failed in {method}: KeyError: 'accuracy'{words}{out if words else ''}"
    with pytest.raises(FedloomError) as caught:
        fedloom.run("scaffold", **RUN, out=out, callbacks=[others[0], fails, others[1]])
    assert str(caught.value) == message
    assert type(caught.value) is FedloomError
    assert caught.value.exit_code == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert [other._left for other in others] == [98, 98], "the others are told of the end"
    assert checkpoint_rounds(out) == saved
    assert (out / "summary.json").exists() == (not words)
    resumed = fedloom.resume(out, report=False)
    assert resumed.digest == whole(tmp_path)
    assert [record["round"] for record in resumed.history] == [0, 1, 2, 3]
    assert fedloom.verify(out) == (resumed.digest, resumed.digest)


def test_a_resumed_run_and_a_verification_report_a_failure_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunStopped):
        fedloom.run("scaffold", **RUN, out=out, callbacks=[StopAfter(1)])
    with pytest.raises(FedloomError, match=r"^callback Fails failed in on_round_end: .*; stopped after round 2; "):
        fedloom.resume(out, report=False, callbacks=[Fails("on_round_end", 1)])
    digest = fedloom.resume(out, report=False).digest
    with pytest.raises(FedloomError, match=r"^callback Fails failed in check: KeyError.*; stopped; .* not verified\.$"):
        fedloom.verify(out, callbacks=[Fails("check", 1)])
    assert fedloom.verify(out) == (digest, digest)


def test_an_error_of_the_run_is_not_hidden_by_one_of_a_callback(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match="min_clients is 2"):
        fedloom.run(
            "fedavg", **RUN, failure_rate=0.99, min_clients=2, out=tmp_path / "r", callbacks=[Fails("on_run_end", 1)]
        )


def test_an_interrupt_in_a_callback_passes(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_round_end(self, record: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedloom.run("fedavg", **RUN, out=tmp_path / "run", callbacks=[Interrupts()])


def test_an_error_ends_a_comparison_which_continues(tmp_path: Path) -> None:
    out, fails, words = tmp_path / "c", Fails("on_round_end", 6), ["fedavg", "scaffold"]
    with pytest.raises(FedloomError, match=f"Fails failed in on_round_end.*continue with .* and --out {out}$"):
        fedloom.compare(words, **RUN, out=out, callbacks=[fails])
    assert checkpoint_rounds(out / "scaffold-seed0") == [1]
    compared = fedloom.compare(words, **RUN, out=out)
    assert compared.runs[1].digest == whole(tmp_path)


def test_an_error_ends_concurrent_runs_which_continue(tmp_path: Path) -> None:
    settings = {name: value for name, value in RUN.items() if name != "report"} | {"rounds": 200}

    def planned(name: str) -> PlannedRun:
        config = make_config({**settings, "method": "fedavg"})
        return (
            tmp_path / name,
            config,
            lambda one: execute_run(resolve_run(config), out=tmp_path / name, callbacks=[one]),
        )

    with (
        pytest.raises(
            FedloomError, match=r"^callback Fails failed in on_round_end: KeyError: 'accuracy'; stopped after"
        ),
        combine_callbacks([Fails("on_round_end", 5)]) as combined,
    ):
        run_concurrently([planned("a"), planned("b")], 2, combined, tmp_path)
    for name in ("a", "b"):
        assert 0 < max(checkpoint_rounds(tmp_path / name)) < 200


def test_the_command_reports_an_error_of_its_display(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no terminal")

    monkeypatch.setattr(ProgressDisplay, "on_round_end", broken)
    ended = command("run", "fedavg", *TINY_OPTIONS, "--engine", "sequential", "--out", "r")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == (
        "fedloom: callback ProgressDisplay failed in on_round_end: RuntimeError: no terminal; stopped after round 1; "
        "continue with: fedloom resume r"
    )
    assert "Traceback" not in ended.err
    monkeypatch.undo()


@pytest.mark.parametrize("given", [Callback(), [Callback], [print], Callback, None])
def test_what_is_no_list_of_callbacks_is_refused(given: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    calls: Sequence[Callable[[], Any]] = (
        lambda: fedloom.run("fedavg", **RUN, out=out, callbacks=given),
        lambda: fedloom.compare(["fedavg"], **RUN, out=out, callbacks=given),
    )
    for call in calls:
        with pytest.raises(InputError, match=r"callbacks must be a list of fedloom\.Callback objects, not "):
            call()
    assert not list(tmp_path.iterdir())
