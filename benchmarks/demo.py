"""Play the demo, and keep what it printed and the results of its runs.

    python -m benchmarks demo --out results/demo.json

The settings of the scenes were settled on other seeds:

    python -m benchmarks demo --seed 10 --out results/demo-settled.json
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.cli.demo.play import play_demo
from fedloom.cli.demo.scenes import DEMO_SCENES


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the demo, print what it prints, and write the results."""
    parser = make_parser("demo", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--folder", type=Path, help="keep the runs in this folder; if it exists, continue there, without times"
    )
    add_out(parser)
    given = parser.parse_args(arguments)
    scenes = list(DEMO_SCENES)
    if given.seed:
        scenes = [replace(scene, settings={**scene.settings, "seed": given.seed}) for scene in scenes]
    found = given.folder is not None and given.folder.exists()
    printed, began, before = StringIO(), time.monotonic(), os.times()
    with tempfile.TemporaryDirectory() as temporary, redirect_stdout(printed):
        folder = given.folder or Path(temporary, "demo")
        results = play_demo(scenes, folder)
    seconds, after = time.monotonic() - began, os.times()
    output = printed.getvalue().replace(str(folder), str(Path("runs", "demo")))  # as without --out
    sys.stdout.write(output)
    by_row = {
        folder: {row: {str(seed): asdict(result) for seed, result in seeds.items()} for row, seeds in rows.items()}
        for folder, rows in results.items()
    }
    result = {
        "command": command_of("demo", [*(["--seed", str(given.seed)] if given.seed else []), "--out", str(given.out)]),
        **describe_machine(),
        "seconds": None if found else round(seconds, 1),
        "cpu seconds": None if found else round(sum(after[:4]) - sum(before[:4]), 1),
        "output": [line.rstrip() for line in output.splitlines()],
        "results": by_row,
    }
    write_result(result, given.out)
