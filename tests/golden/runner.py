"""Run golden cases with one tree's fedloom in one process.

It records what they wrote.

    python -m tests.golden.runner FOLDER < {"NAME": {"commands": [...], "files": ..., "stop": ...}}

Prints one line of JSON for each case. A fedloom is driven by its command and known by its files alone.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.golden import draws
from tests.golden.files import MAKERS

Result = dict[str, Any]
"""What a case came to: `exit` and `message` of each command; `runs` by folder, with `command`, `config`, `metrics`,
`summary`, `digest`, `weights` and `files`; `written`, other files; `draws`, how often each stream was made."""
HERE = "HERE"
"""What the folder of a case is called in its results."""


def play(commands: Sequence[Sequence[str]], files: str, stop: str, folder: Path) -> Result:
    """Give the commands of one case in a new folder."""
    folder.mkdir(parents=True)
    folder = folder.resolve()
    if files:
        MAKERS[files](folder)
    given = {path.name for path in folder.iterdir()}
    notes = folder / ".draws"
    ended = []
    for number, command in enumerate(commands):
        environ = {draws.NOTES: str(notes), draws.STOP: "" if number else stop, "FEDLOOM_DATA": str(folder)}
        with _surroundings(folder, environ):
            ended.append(_call(command))
    lines = notes.read_text().splitlines() if notes.exists() else []
    runs = sorted(path.parent for path in folder.rglob("config.toml"))
    written = [path for path in folder.iterdir() if path.is_file() and path.name not in {*given, notes.name}]
    return {
        "exit": [code for code, _ in ended],
        "message": [text.replace(str(folder), HERE) for _, text in ended],
        "runs": {str(path.relative_to(folder)): _run(path, folder) for path in runs},
        "written": {path.name: _sha(path) for path in sorted(written)},
        "draws": dict(sorted(Counter(lines).items())),
    }


def _call(command: Sequence[str]) -> tuple[int, str]:
    """The exit code, and the error in one line."""
    from fedloom.__main__ import main

    sys.argv = ["fedloom", *command]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    errors = [line for line in told.getvalue().splitlines() if line.startswith("fedloom: ")]
    return (code, " ".join(errors)) if isinstance(code, int) else (-1, code)


@contextlib.contextmanager
def _surroundings(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """What a command may change in its process is afterwards as it was."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before, argv = dict(os.environ), sys.argv
    os.environ.update(environ)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run(path: Path, folder: Path) -> Result:
    """What a run left in its folder, as flat tables of keys and values."""
    config = tomllib.loads((path / "config.toml").read_text().replace(str(folder), HERE))
    metrics, summary = path / "metrics.jsonl", path / "summary.json"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    totals = json.loads(summary.read_text().replace(str(folder), HERE)) if summary.exists() else {}
    model = path / "model.safetensors"
    return {
        "command": dict(parse(shlex.split(config.pop("command", "")))),
        "config": _flat(config),
        "metrics": [_without_times(_flat(json.loads(line))) for line in lines],
        "digest": totals.pop("digest", None),
        "summary": _without_times(_flat(totals)),
        "weights": _tensors(model) if model.exists() else None,
        "files": sorted(entry.name for entry in path.iterdir()),
    }


def parse(words: Sequence[str]) -> list[tuple[str, Any]]:
    """A command as pairs: '' and what comes before its options, then options (and `--set METHOD.OPTION`) and values."""
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    pairs: list[tuple[str, Any]] = [("", list(words[:first]))] if first else []
    rest = list(words[first:])
    while rest:
        name = rest.pop(0)
        value = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if name == "--set" and value is not None:
            option, _, value = value.partition("=")
            name = f"--set {option}"
        pairs.append((name, value))
    return pairs


def unparse(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """The words of such pairs."""
    words: list[str] = []
    for name, value in pairs:
        if not name:
            words += value
        elif name.startswith("--set "):
            words += ["--set", f"{name.removeprefix('--set ')}={value}"]
        else:
            words += [name] if value is None else [name, value]
    return words


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def _without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """That something was timed is a fact, how long it took is none, nor are checksums, which cover the times."""
    kept = {key: value for key, value in values.items() if key not in ("sha256", "metrics_sha256")}
    return {key: "time" if key.split(".")[0] == "seconds" else value for key, value in kept.items()}


def _tensors(path: Path) -> str:
    """The tensors of a safetensors file, without its metadata."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + content[start:]).hexdigest()


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Play the cases of stdin. The fedloom is the first in PYTHONPATH, and `hook`, which notes draws, is the last."""
    folder, plans = Path(sys.argv[1]), json.load(sys.stdin)
    import fedloom

    tree = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()
    assert Path(fedloom.__file__).resolve().is_relative_to(tree), f"{fedloom.__file__} is not in {tree}"
    results = os.fdopen(os.dup(1), "w")  # nothing that a run prints gets into the results
    os.dup2(2, 1)
    for number, (name, plan) in enumerate(plans.items()):
        began = time.perf_counter()
        result = play(plan["commands"], plan["files"], plan["stop"], folder / str(number))
        seconds = round(time.perf_counter() - began, 2)
        print(json.dumps({"name": name, "seconds": seconds, "result": result}), file=results, flush=True)


if __name__ == "__main__":
    main()
