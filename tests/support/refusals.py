"""Run commands that must fail with one sentence."""

from collections.abc import Callable
from typing import Any

Command = Callable[..., Any]

TINY = ("--clients", 6, "--clients-per-round", 4, "--rounds", 2, "--model", "logreg", "--epochs", 1)


def refused(ended: Any, *words: str, code: int = 2) -> None:
    """One sentence with these words, and nothing else."""
    assert ended.out == ""
    assert ended.err.startswith("fedloom: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.endswith("\n")
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err, ended.err
    assert ended.code == code
