"""What benchmarks share: the parser, and the file of a result.

A result names its command and machine.
"""

import argparse
import json
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def make_parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of benchmark `name`; its module docstring is the description."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option `--out`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")


def command_of(name: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a measurement."""
    return shlex.join(["python", "-m", "benchmarks", name, *arguments])


def describe_machine() -> dict[str, Any]:
    """Return the processor, its number of cores, and the versions of Python and PyTorch."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_result(result: object, path: Path | None) -> None:
    """Write a result to a JSON file, if there is one."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
