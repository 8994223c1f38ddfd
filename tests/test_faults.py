"""What goes wrong in a run: clients that fail or lie, people who press Ctrl-C, disks that are full."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom import Bench, Layout, Local, Method, Options, Pass, register
from fedloom.engines import HostEngine
from fedloom.experiment import build
from fedloom.folder import RunFolder
from fedloom.methods.scaffold import ScaffoldCompanion, ScaffoldLocal, ScaffoldOptions

Command = Callable[..., Any]
TINY: dict[str, Any] = {"clients": 6, "per_round": 6, "rounds": 3, "model": "logreg", "epochs": 1, "report": False}
TINY_OPTIONS = ("--clients", 6, "--per-round", 6, "--rounds", 3, "--model", "logreg", "--epochs", 1)
FAULTY = (2, 3, 4, 5)


class Faulty(Local[Options]):
    """Clients 2 to 5 each do something else wrong."""

    def uploads(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"greeting": (3,)}

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield Pass(self.step)
        if bench.client == 2:
            raise RuntimeError("the disk of this site\nis on fire")
        if bench.client == 3:
            bench.row[7] = float("nan")
        if bench.client == 4:
            bench.row[0] = float("-inf")
        if bench.client == 5:
            bench.uploads["greeting"] = torch.zeros(4)


class Hopeless(Local[Options]):
    """Nobody ever answers."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield Pass(self.step)
        raise ValueError(f"client {bench.client} is out of order")


class Suicidal(Local[Options]):
    """Client 3 takes its whole process with it."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield Pass(self.step)
        if bench.client == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class Quitter(Local[Options]):
    """Client 3 ends its process as if all were well."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield Pass(self.step)
        if bench.client == 3:
            os._exit(0)


class Raiser(Local[Options]):
    """Client 3 fails in the ordinary way."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield Pass(self.step)
        if bench.client == 3:
            raise OSError("no")


class Poisoned(ScaffoldLocal):
    """SCAFFOLD whose client 3 sends NaN in odd rounds, after having changed what it keeps at home."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield from super().train(bench)
        if bench.client == 3 and bench.round % 2:
            bench.home["c"].fill_(1e6)
            bench.row[0] = float("nan")


class Silent(ScaffoldLocal):
    """SCAFFOLD whose client 3 raises in odd rounds."""

    def train(self, bench: Bench) -> Iterator[Pass]:
        yield from super().train(bench)
        if bench.client == 3 and bench.round % 2:
            raise OSError("no")


def _signals(signals: int) -> type[Local[Options]]:
    class Signals(Local[Options]):
        """Client 2 presses Ctrl-C in round 1 (from 0), this many times."""

        def train(self, bench: Bench) -> Iterator[Pass]:
            yield Pass(self.step)
            if bench.client == 2 and bench.round == 1:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)

    return Signals


LOCALS: dict[str, type[Local[Any]]] = {
    "test-faulty": Faulty,
    "test-hopeless": Hopeless,
    "test-suicidal": Suicidal,
    "test-quitter": Quitter,
    "test-raiser": Raiser,
    "test-once": _signals(1),
    "test-twice": _signals(2),
}


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods above, for one test."""
    fedloom.methods.methods()
    monkeypatch.setattr(
        "fedloom.methods.catalogue._methods", dict(fedloom.methods.catalogue._methods)
    )  # what is registered here is gone afterwards
    for name, local in LOCALS.items():
        register(Method(name=name, title=name, summary="", reference="", local=local))
    for name, local in (("test-poisoned", Poisoned), ("test-silent", Silent)):
        register(
            Method(
                name=name,
                title=name,
                summary="",
                reference="",
                options=ScaffoldOptions,
                local=local,
                companion=ScaffoldCompanion,
            )
        )


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The command ignores further signals once it has been told to stop: here, others come after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tiny(folder: Path, method: str, **settings: Any) -> fedloom.Run:
    return fedloom.run(method, out=folder, **{**TINY, **settings})


# clients that fail


@pytest.mark.parametrize("engine", ["plain", "host"])
def test_failing_and_lying_clients_are_counted_and_named(tmp_path: Path, engine: str) -> None:
    run = tiny(tmp_path / engine, "test-faulty", engine=engine)
    for record in run.history[1:]:
        assert (record["clients"], record["lost"]) == (6, 4)
        assert record["lost_clients"].keys() == set(map(str, FAULTY))
        assert record["lost_clients"]["2"] == "RuntimeError: the disk of this site is on fire"
        assert record["lost_clients"]["3"] == "refused: its model is not finite"
        assert record["lost_clients"]["4"] == "refused: its model is not finite"
        assert "greeting" in record["lost_clients"]["5"]
        assert "(4,)" in record["lost_clients"]["5"]
        assert "(3,)" in record["lost_clients"]["5"]
        assert record["accuracy"] is not None
        assert "note" not in record
    assert run.summary["lost"] == 3 * 4
    assert all(torch.isfinite(value).all() for value in run.model().state_dict().values())


def test_the_rest_is_averaged_as_if_nobody_else_had_been_asked(tmp_path: Path) -> None:
    """The survivors are clients 0 and 1: their mean by hand."""
    run = tiny(tmp_path / "r", "test-faulty", rounds=1)
    config = fedloom.config.make_config({k: v for k, v in TINY.items() if k != "report"} | {"engine": "plain"})
    with build(config).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        jobs = [job for job in server.dispatch(0, server.select(0)) if job.client not in FAULTY]
        rows = [(u.row.double().clone(), u.samples) for u in experiment.engine.train(0, jobs)]
        mean = sum(row * count for row, count in rows) / sum(count for _, count in rows)
        expected = experiment.layout.state_dict(mean.float())
    for name, value in run.model().state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("engine", ["plain", "host"])
def test_a_round_without_a_survivor_keeps_the_model(command: Command, tmp_path: Path, engine: str) -> None:
    ended = command("run", "test-hopeless", *TINY_OPTIONS, "--engine", engine, "--out", "r")
    assert ended.code == 0
    assert ended.err.count("no client answered, so the model was kept as it was") == 3
    assert "18 answers of clients" in ended.out
    history = RunFolder.open(tmp_path / "r").history()
    assert len({record["loss"] for record in history}) == 1
    assert all("note" in record and record["train_loss"] is None for record in history[1:])
    untouched = tiny(tmp_path / "untouched", "fedavg", rounds=1, epochs=0)
    assert RunFolder.open(tmp_path / "r").summary()["digest"] == untouched.digest  # type: ignore[index]


def test_too_few_survivors_end_the_run_with_a_sentence(command: Command) -> None:
    ended = command("run", "test-faulty", *TINY_OPTIONS, "--min-clients", 3, "--quiet")
    assert ended.code == 1
    assert ended.err.startswith("fedloom: round 1: 2 of 6 clients answered, but min_clients is 3 (client ")
    assert ended.err.count("\n") == 1
    assert command("run", "test-faulty", *TINY_OPTIONS, "--min-clients", 2, "--quiet").code == 0


@pytest.mark.parametrize(("method", "how"), [("test-suicidal", "signal 9"), ("test-quitter", "exit code 0")])
def test_a_client_that_kills_its_process_is_given_up_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str
) -> None:
    engines: list[HostEngine] = []
    real = HostEngine.__init__
    monkeypatch.setattr(HostEngine, "__init__", lambda self, *a: (engines.append(self), real(self, *a))[1])
    run = tiny(tmp_path / "r", method, workers=2)
    for record in run.history[1:]:
        assert record["lost_clients"] == {"3": f"its worker died 3 times ({how})"}
    assert engines[0].deaths == 3 * 3
    assert run.digest == tiny(tmp_path / "s", "test-raiser", engine="plain").digest


@pytest.mark.parametrize("engine", ["plain", "host"])
def test_a_refused_update_does_not_change_what_its_client_keeps(tmp_path: Path, engine: str) -> None:
    """What client 3 wrote into its home in a refused round is as if it had never been."""
    settings = {"rounds": 5, "engine": engine}
    poisoned = tiny(tmp_path / "a", "test-poisoned", **settings)
    silent = tiny(tmp_path / "b", "test-silent", **settings)
    assert poisoned.summary["lost"] == silent.summary["lost"] == 2
    assert poisoned.digest == silent.digest != tiny(tmp_path / "c", "scaffold", **settings).digest


def test_simulated_losses_are_the_same_each_time(command: Command) -> None:
    words = ("run", "fedavg", *TINY_OPTIONS, "--lost", 0.5, "--json")
    first, second = command(*words).result, command(*words).result
    assert first["digest"] == second["digest"]
    assert 0 < first["lost"] == second["lost"] < 18
    assert first["bytes_up"] < first["bytes_down"]


# Ctrl-C


def test_an_interrupt_stops_after_the_round_and_the_run_goes_on(command: Command, tmp_path: Path) -> None:
    words = ("run", "test-once", *TINY_OPTIONS, "--engine", "plain")
    ended = command(*words, "--out", "r")
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "fedloom: stopped after round 2; go on with: fedloom resume r"
    assert "once more stops at once" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "r" / "summary.json").exists()
    resumed = command("resume", "r", "--json").result
    assert resumed["digest"] == command("run", "fedavg", *TINY_OPTIONS, "--json").result["digest"]
    rounds = [record["round"] for record in RunFolder.open(tmp_path / "r").history()]
    assert rounds == [0, 1, 2, 3]


def test_a_second_interrupt_stops_at_once(command: Command, tmp_path: Path) -> None:
    ended = command("run", "test-twice", *TINY_OPTIONS, "--engine", "plain", "--out", "r", "--json")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[-1] == "fedloom: interrupted; go on with: fedloom resume r"
    assert "Traceback" not in ended.err
    assert [record["round"] for record in RunFolder.open(tmp_path / "r").history()] == [0, 1]


def test_an_interrupt_before_the_run_begins(command: Command, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = command("run", "fedavg", *TINY_OPTIONS, "--import", "slow.py")
    assert (ended.code, ended.out, ended.err) == (130, "", "fedloom: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.py"]


def test_a_stopped_comparison_says_how_the_comparison_goes_on(command: Command) -> None:
    words = ("compare", "test-once", "fedprox", *TINY_OPTIONS, "--engine", "plain", "--out", "c")
    ended = command(*words)
    assert ended.code == 130
    last = ended.err.splitlines()[-1]
    assert "same command" in last
    assert "--out c" in last


@pytest.mark.parametrize("times", ["once", "twice"])
def test_a_stopped_verification_offers_nothing_to_resume(command: Command, tmp_path: Path, times: str) -> None:
    """It runs in a folder that is deleted."""
    command("run", "fedavg", *TINY_OPTIONS, "--engine", "plain", "--out", "r", "--json").result  # noqa: B018
    config = tmp_path / "r" / "config.toml"
    config.write_text(config.read_text().replace('method = "fedavg"', f'method = "test-{times}"'))
    ended = command("verify", "r")
    assert ended.code == 130
    assert "resume" not in ended.err.splitlines()[-1]
    assert "r was not verified" in ended.err.splitlines()[-1]


class Process:
    """A real `fedloom` in a session of its own, so that a signal reaches it as a terminal would send it."""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=60)

    def __init__(self, folder: Path, *words: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "fedloom", *map(str, words)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, text: str) -> None:
        assert self.popen.stderr is not None
        while text not in self.seen:  # pytest's timeout ends a wait in vain
            line = self.popen.stderr.readline()
            assert line, f"it ended before {text!r}: {self.seen}"
            self.seen += line

    def ends(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, out, self.seen + err


ENDLESS = ("--clients", 6, "--per-round", 6, "--rounds", 3000, "--model", "logreg", "--workers", 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_stops_and_goes_on(command: Command, tmp_path: Path, number: int) -> None:
    with Process(tmp_path, "run", "scaffold", *ENDLESS, "--out", "r") as process:
        process.wait_for("3000 rounds")
        os.killpg(process.popen.pid, number)
        code, out, err = process.ends()
    assert (code, out) == (130, "")
    assert "go on with: fedloom resume r" in err.splitlines()[-1]
    assert "Traceback" not in err
    # three more rounds, and the same bits as without the stop
    history = RunFolder.open(tmp_path / "r").history()
    rounds = history[-1]["round"] + 3
    config = tmp_path / "r" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3000", f"rounds = {rounds}"))
    resumed = command("resume", "r", "--json").result
    whole = command("run", "scaffold", *ENDLESS, "--rounds", rounds, "--json").result
    assert (resumed["digest"], resumed["rounds"]) == (whole["digest"], rounds)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_impatient_person_gets_away_at_once(tmp_path: Path, number: int) -> None:
    """Long rounds, and the signal again and again, also while the process is ending."""
    with Process(tmp_path, "run", "fedavg", *ENDLESS, "--epochs", 20000, "--out", "r") as process:
        process.wait_for("3000 rounds")
        os.killpg(process.popen.pid, signal.SIGINT)
        process.wait_for("once more stops at once")
        for _ in range(500):
            os.killpg(process.popen.pid, number)
            try:
                process.popen.wait(timeout=0.02)
                break
            except subprocess.TimeoutExpired:
                continue
        code, out, err = process.ends()
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert "go on with: fedloom resume r" in err


# the disk


def test_a_full_disk_ends_in_a_sentence_and_the_run_goes_on_later(command: Command, tmp_path: Path) -> None:
    """Files may not grow beyond 2,500 bytes: the model's checkpoint does."""
    code = (
        "import resource, signal, sys\n"
        "from fedloom.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
        "main(sys.argv[1:])\n"
    )
    assert resource.RLIM_INFINITY  # the limit is set in the other process alone
    words = [*map(str, ("run", "scaffold", *TINY_OPTIONS, "--out", "r", "--checkpoint-seconds", 0, "-q"))]
    process = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert process.stderr.startswith("fedloom: cannot write r/checkpoints/")
    assert process.stderr.endswith("File too large.\n")
    assert process.stderr.count("\n") == 1
    resumed = command("resume", "r", "--json").result
    assert resumed["digest"] == command("run", "scaffold", *TINY_OPTIONS, "--json").result["digest"]
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.parametrize("after", range(0, 12, 3))
def test_no_space_at_the_nth_write(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    real, calls = os.fsync, iter(range(10**6))

    def full(handle: int) -> None:
        if next(calls) >= after:
            raise OSError(28, "No space left on device")
        real(handle)

    words = ("run", "scaffold", *TINY_OPTIONS, "--checkpoint-seconds", 0, "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = command(*words, "--out", "r")
    assert ended.code == 1
    assert ended.err.startswith("fedloom: cannot write r/")
    assert ended.err.endswith("No space left on device.\n")
    again = ("resume", "r", "--json") if (tmp_path / "r" / "config.toml").exists() else (*words, "--out", "r", "--json")
    assert command(*again).result["digest"] == command(*words, "--json").result["digest"]
