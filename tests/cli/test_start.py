"""Tests of bare `fedloom`, of quick answers, and of the line while PyTorch loads."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli.main import START, app
from fedloom.cli.output import show_loading

Command = Callable[..., Any]

QUICK = ["", "--version", "--help", "run --help", "compare --help"]
QUICK += ["list methods", "list datasets --json", "list models", "list partitions"]
HEAVY = {"torch", "numpy", "scipy", "sklearn", "plotly", "pandas", "pyarrow", "PIL", "safetensors", "flwr"}


@pytest.mark.parametrize("words", QUICK)
def test_quick_answers_load_nothing_heavy(words: str) -> None:
    code = (
        "import sys\n"
        "from fedloom.__main__ import main\n"
        f"sys.argv = ['fedloom', *{words.split()}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == "[]\n"
    assert ended.stdout


def test_fedloom_alone_says_five_things_to_try(command: Command) -> None:
    ended = command()
    assert (ended.code, ended.out, ended.err) == (0, f"{START}\n", "")
    things = [line for line in START.splitlines() if line.startswith("  fedloom ")]
    assert len(things) == 5
    assert max(map(len, START.splitlines())) <= 80
    assert {line.split()[1] for line in things} >= {"demo", "run", "compare", "list"}


def test_a_line_tells_that_pytorch_loads_and_goes_away(tmp_path: Path) -> None:
    """On a terminal only."""
    words = [sys.executable, "-m", "fedloom", "resume", "nothing"]
    ours, theirs = pty.openpty()
    process = subprocess.run(words, stderr=theirs, stdout=subprocess.DEVNULL, cwd=tmp_path, timeout=60)
    os.close(theirs)
    said = ""
    while not said.endswith("\r\n"):  # the terminal may hand on the line in pieces
        said += os.read(ours, 10_000).decode()
    os.close(ours)
    assert process.returncode == 2
    assert re.fullmatch(r"loading PyTorch \.\.\.\r\x1b\[2Kfedloom: [^\n]*nothing[^\n]*\r\n", said), said


@pytest.mark.parametrize(
    ("terminal", "quiet", "loaded", "shown"),
    [(True, False, False, True), (False, False, False, False), (True, True, False, False), (True, False, True, False)],
)
def test_when_the_line_is_shown(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    quiet: bool,
    loaded: bool,
    shown: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    with suppress(KeyboardInterrupt), show_loading(quiet):
        assert capsys.readouterr().err == ("loading PyTorch ..." if shown else "")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ("\r\x1b[2K" if shown else "")


def test_the_commands_are_known() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {line.split()[1] for line in START.splitlines() if line.startswith("  fedloom ")} <= names
