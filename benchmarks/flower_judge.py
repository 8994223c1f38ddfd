"""How a run with faults (flower_faults.py) is judged: by its rounds, its accuracy, its digest and its logs."""

import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flower_world import App, Missing, World, wait_until

from fedloom.config import Config, replace_config
from fedloom.runs.execute import execute_run

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.lossy_engine import LosingSites

GOOD = 0.85
"""Accuracy that every run must end with; without faults these have 0.93 and more."""


@dataclass
class Outcome:
    """A row of the table."""

    scenario: str
    fault: str
    happens: str
    """What becomes of it."""
    said: list[str]
    """Lines that a person finds in the logs; `where: text`."""
    seconds: float = 0.0
    rounds: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """round:client and why."""
    late: int = 0
    accuracy: float = 0.0
    same_digest: bool = False
    """As the run in one process with the same answers lost."""


def judged(app: App, fault: str, happens: str, said: list[str]) -> Outcome:
    """The row of a run that has ended, which must have ended well."""
    summary, history, lost = app.summary(), app.history(), app.lost()
    played = [record["round"] for record in history]
    expect(played == list(range(app.config.rounds + 1)), f"the rounds are {played}")
    expect(summary["accuracy"] >= GOOD, f"the accuracy is {summary['accuracy']}")
    same = summary["digest"] == reference(app.config.model_dump_json(), frozenset(lost))
    expect(same, f"the digest is another one than that of a run without {sorted(lost)}")
    late = max(int(record.get("diagnostics", {}).get("engine.late", 0)) for record in history)
    named = {f"{round}:{client}": reason for (round, client), reason in sorted(lost.items())}
    accuracy = round_to(summary["accuracy"])
    name = app.folder.name
    return Outcome(name, fault, happens, said, 0.0, app.config.rounds, named, late, accuracy, same)


@cache
def reference(settings: str, lost: frozenset[tuple[int, int]]) -> str:
    """The digest of this run in one process with these answers lost, by rounds as records count them."""
    config = replace_config(Config.model_validate_json(settings), engine="plain")
    sites = LosingSites(frozenset((round - 1, client) for round, client in lost))
    with tempfile.TemporaryDirectory() as folder:
        return execute_run(config, out=Path(folder) / "run", report=False, sites=sites).digest


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Missing(otherwise)


def in_log(app: App, text: str) -> str:
    """A line that `flwr log` shows of the run."""
    wait_until(lambda: text in app.log, f"{text!r} in the run's log", 10)
    return f"flwr log: {text}"


def in_process(world: World, name: str, text: str) -> str:
    world.says(name, text)
    return f"SuperNode: {text}"


def peak_memory(world: World) -> int:
    """The most memory that the ServerApp has had, in bytes."""
    status = Path(f"/proc/{world.server_app().pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def round_to(value: float) -> float:
    return round(value, 4)
