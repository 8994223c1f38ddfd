"""A scene of the demo: a comparison, the claims it tests, its commands."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

START_METHOD = "centralized"
"""The method that trains a start model."""

Measure = Literal["accuracy", "spread", "first", "jump"]
"""What a claim is about: the result; how much accuracy varies from round to round, where less is better; accuracy after
the first round; the change of accuracy in the round after `DemoScene.jump_round`."""


@dataclass(frozen=True)
class DemoFinding:
    """Another difference of two rows, which says where a gain comes from, or at which learning rate it holds."""

    row: str
    baseline: str
    text: str
    """How the sentence goes on. `{gain}` becomes the difference in the measures, and `{outcome}` says whether it
    supports the claim."""
    measures: tuple[Measure, ...] = ()
    """By default those of the claim."""


@dataclass(frozen=True)
class DemoClaim:
    """A paper's claim: one row is better than another in every one of `measures`."""

    paper: str
    text: str
    """The claim in one sentence."""
    row: str
    baseline: str
    measures: tuple[Measure, ...]
    findings: tuple[DemoFinding, ...]

    @property
    def method(self) -> str:
        return self.row.partition(":")[0]


@dataclass(frozen=True)
class StartModel:
    """A network that is trained before the comparison, on all samples in one place."""

    folder: str
    settings: Mapping[str, Any]

    def words(self) -> list[str]:
        """Return the command that trains it."""
        return ["fedloom", "run", START_METHOD, *_flags(self.settings), "--out", self.folder]


@dataclass(frozen=True)
class DemoScene:
    """One comparison, and the claims that it tests."""

    title: str
    claims: tuple[DemoClaim, ...]
    rows: Mapping[str, float]
    """The rows of the comparison, each with the seconds of one run on two idle cores."""
    settings: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int = 3
    start: StartModel | None = None
    jump_round: int = 0

    @property
    def names(self) -> list[str]:
        """The methods whose claims it tests."""
        return [claim.row.partition(":")[0] for claim in self.claims]

    @property
    def folder(self) -> str:
        return "-".join(self.names)

    @property
    def seconds(self) -> float:
        """Seconds of all runs on two idle cores."""
        return self.seeds * sum(self.rows.values())

    def plan(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Return the seconds of each run, by row and seed, and those of the runs before it."""
        first, before = self.settings.get("seed", 0), 0.0
        plan = {}
        for row, seconds in self.rows.items():
            for seed in range(first, first + self.seeds):
                plan[row, seed] = seconds, before
                before += seconds
        return plan

    def commands(self) -> list[list[str]]:
        """Return its commands as words: first the one that trains the start model, if there is one."""
        words = ["fedloom", "compare", *self.rows, *_flags(self.settings), "--seeds", str(self.seeds)]
        if self.start:
            words += ["--init", self.start.folder, "--new-head"]
        for method, pairs in self.options.items():
            words += [word for key, value in pairs.items() for word in ("--set", f"{method}.{key}={value}")]
        return [self.start.words(), words] if self.start else [words]


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


WIDTH = 100


def format_demo_command(words: list[str]) -> str:
    """Return a command in lines that a shell takes as one."""
    lines, line = [], ""
    for group in _join_options(words):
        if line and len(line) + len(group) > WIDTH - 3:
            lines.append(f"{line} \\")
            line = f"    {group}"
        else:
            line += f" {group}" if line else group
    return "\n".join([*lines, line])


def _join_options(words: list[str]) -> list[str]:
    """Return the words, each option together with its value."""
    joined: list[str] = []
    for word in map(shlex.quote, words):
        if joined and joined[-1].startswith("--") and " " not in joined[-1] and not word.startswith("--"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined
