"""The results file of the CUDA benchmark, and the time limit of each part."""

import argparse
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import write_result


class ResultTable:
    """The results so far; writes them after each new entry."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.out
        self._command: str = options.command
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_text())
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU: these figures mean nothing"
        triton = version("triton") if find_spec("triton") is not None else None
        self._found["machine"] = {"device": name, "torch": torch.__version__, "triton": triton}

    def put(self, part: str, name: str, value: Any) -> None:
        """Add the result `name` of a part."""
        self._found.setdefault("commands", {})[f"{part}: {name}"] = self._command
        self._found.setdefault(part, {})[name] = value
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)
        write_result(self._found, self._path)


class TimeLimit:
    """The minutes that a part may take."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def until_over(self, things: list[Any]) -> Iterator[Any]:
        """Yield things until the time is over."""
        for thing in things:
            if time.monotonic() > self._end:
                print(f"no time left for {thing} and the rest of this part", flush=True)
                return
            yield thing
