"""The sheet on which benchmarks/gpu.py writes its results, and the clock of each of its parts."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


class Sheet:
    """The results so far; written whenever something is added."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.out
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_text())
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU: these figures mean nothing"
        triton = version("triton") if find_spec("triton") is not None else None
        self._found["machine"] = {"device": name, "torch": torch.__version__, "triton": triton}

    def put(self, part: str, name: str, value: Any) -> None:
        self._found.setdefault("commands", {})[f"{part}: {name}"] = " ".join(["python", *sys.argv])
        self._found.setdefault(part, {})[name] = value
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n")


class Clock:
    """So many minutes for a part."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def while_left(self, things: list[Any]) -> Iterator[Any]:
        for thing in things:
            if time.monotonic() > self._end:
                print(f"no time left for {thing} and what comes after it", flush=True)
                return
            yield thing
