"""Check a run with faults by its rounds, its accuracy, its digest and its logs."""

import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.flower.deployment import App, CheckFailed, Deployment, wait_until
from fedloom.config import Config, replace_config
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from tests.support.lossy_engine import LosingSites

GOOD = 0.85
"""Lowest final accuracy of a run; runs without faults reach at least 0.93."""


@dataclass
class Outcome:
    """One row of the table."""

    scenario: str
    fault: str
    happens: str
    """What the fault leads to."""
    said: list[str]
    """Lines in the logs, as `where: text`."""
    seconds: float = 0.0
    rounds: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """The reason by `round:client`."""
    late: int = 0
    accuracy: float = 0.0
    same_digest: bool = False
    """Whether the digest equals that of a run in one process with the same failures."""


def check_run(app: App, fault: str, happens: str, said: list[str]) -> Outcome:
    """Check a finished run and return its row of the table."""
    summary, history, failed = app.summary(), app.history(), app.failed_clients()
    rounds = [record["round"] for record in history]
    expect(rounds == list(range(app.config.rounds + 1)), f"the rounds are {rounds}")
    expect(summary["last_accuracy"] >= GOOD, f"the accuracy is {summary['last_accuracy']}")
    same = summary["digest"] == reference(app.config.model_dump_json(), frozenset(failed))
    expect(same, f"the digest differs from that of a run in which {sorted(failed)} failed")
    late = max(int(record.get("diagnostics", {}).get("engine.late", 0)) for record in history)
    named = {f"{round}:{client}": reason for (round, client), reason in sorted(failed.items())}
    accuracy = round(summary["last_accuracy"], 4)
    name = app.folder.name
    return Outcome(name, fault, happens, said, 0.0, app.config.rounds, named, late, accuracy, same)


@cache
def reference(settings: str, lost: frozenset[tuple[int, int]]) -> str:
    """Return the digest of the run in one process with these failures; rounds count from 1."""
    config = replace_config(Config.model_validate_json(settings), engine="sequential")
    sites = LosingSites(frozenset((round - 1, client) for round, client in lost))
    with tempfile.TemporaryDirectory() as folder:
        return execute_run(resolve_run(config), out=Path(folder) / "run", report=False, remote_engine=sites).digest


def expect(holds: bool, otherwise: str) -> None:
    """Raise `CheckFailed` unless a condition holds."""
    if not holds:
        raise CheckFailed(otherwise)


def find_in_run_log(app: App, text: str) -> str:
    """Wait for a line in the log of the run, as `flwr log` shows it."""
    wait_until(lambda: text in app.log, f"{text!r} in the run's log", 10)
    return f"flwr log: {text}"


def find_in_node_log(deployment: Deployment, name: str, text: str) -> str:
    """Wait for a line in the log of a SuperNode."""
    deployment.wait_for_log(name, text)
    return f"SuperNode: {text}"


def peak_memory(deployment: Deployment) -> int:
    """Return the peak memory of the ServerApp in bytes."""
    status = Path(f"/proc/{deployment.server_app().pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10
