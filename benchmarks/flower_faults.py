"""Faults of a federation, each with real Flower processes on this machine: what happens, and that the run ends well.

    python benchmarks/flower_faults.py --out results/flower-faults.json
    python benchmarks/flower_faults.py --only node-killed
    python benchmarks/flower_faults.py --table results/flower-faults.json

One SuperLink and three SuperNodes, TLS and node keys, the digits. Every scenario ends with the same question: has the
run all its rounds, a good model, and the very digest of a run in one process that lost the same answers in the same
rounds? Deadlines are short here so that a scenario takes a minute; `deadline` of a real run is for the sites to say.

The scenarios are in flower_scenarios.py, and how a run is judged in flower_judge.py.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flower_judge import Outcome
from flower_scenarios import SCENARIOS
from flower_world import Missing, a_world

from fedloom.utils.storage import write_atomically


def table(scenarios: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| fault | what happens | look for | answers lost | accuracy | s |", "|---|---|---|---|---|---|"]
    for row in scenarios:
        said = "; ".join(f"`{line}`" for line in row["said"])
        lost = f"{len(row['lost'])}" + (f", {row['late']} of them came late" if row["late"] else "")
        cells = [row["fault"], row["happens"], said, lost, f"{row['accuracy']:.3f}", f"{row['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="play this one; may be repeated")
    parser.add_argument("--out", type=Path, help="write the table here, as JSON")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and runs, which stays")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print what --out wrote as a table, and do nothing else"
    )
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())["scenarios"]), end="")
        return
    failures = 0
    with (
        tempfile.TemporaryDirectory(prefix="fedloom-faults-") as scratch,
        a_world(given.keep or Path(scratch)) as world,
    ):
        for name in given.only or SCENARIOS:
            start = time.monotonic()
            try:
                world.ready()
                found = SCENARIOS[name](world)
            except Missing as error:
                failures += 1
                print(f"{name}: FAILED: {error}", flush=True)
                continue
            for row in found:
                row.seconds = round(time.monotonic() - start, 1)
                print(f"{row.scenario}: {row.fault}: {row.happens}; accuracy {row.accuracy}", flush=True)
                for line in row.said:
                    print(f"    {line}", flush=True)
            if given.out:
                note(given.out, name, found)
    sys.exit(1 if failures else 0)


def note(path: Path, name: str, found: Sequence[Outcome]) -> None:
    """Put the rows of a scenario where its old ones were."""
    rows = json.loads(path.read_text())["scenarios"] if path.exists() else []
    rows = [row for row in rows if row["scenario"].partition("/")[0] != name] + [asdict(row) for row in found]
    order = list(SCENARIOS)
    rows.sort(key=lambda row: order.index(row["scenario"].partition("/")[0]))
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "scenarios": rows}
    write_atomically(path, (json.dumps(about, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
