"""A scene of the demo: a comparison, the claims it tests, its commands."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class StartModel:
    """A network that is trained before the comparison, in the ordinary way."""

    file: str
    data: str
    settings: Mapping[str, Any]

    def words(self) -> list[str]:
        """Return the command that trains it."""
        return ["fedloom", "pretrain", self.data, *_flags(self.settings), "--out", self.file]


@dataclass(frozen=True)
class DemoScene:
    """One comparison, and the claims that it tests."""

    title: str
    claims: tuple[DemoClaim, ...]
    rows: tuple[str, ...]
    """The rows of the comparison: methods with options and settings."""
    settings: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int = 3
    start: StartModel | None = None
    jump_round: int = 0

    @property
    def names(self) -> list[str]:
        """The methods whose claims it tests."""
        return [claim.row for claim in self.claims]

    @property
    def folder(self) -> str:
        return "-".join(self.names)

    def commands(self) -> list[list[str]]:
        """Return its commands as words: first the one that trains the start model, if there is one."""
        words = ["fedloom", "compare", *self.rows, *_flags(self.settings), "--seeds", str(self.seeds)]
        if self.start:
            words += ["--init", self.start.file, "--new-head"]
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
