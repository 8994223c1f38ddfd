"""Inject faults into a deployment of real Flower processes, and check the run.

    python -m benchmarks flower-faults --out results/flower-faults.json
    python -m benchmarks flower-faults --only node-killed
    python -m benchmarks flower-faults --table results/flower-faults.json

The deployment has one SuperLink and three SuperNodes with TLS and node keys, and trains on the digits. Each scenario
ends with the same checks: the run has all its rounds and a good model, and its digest equals that of a run in one
process in which the same clients failed in the same rounds. Deadlines are short here, so a scenario takes about a
minute.

benchmarks/flower/scenarios.py has the scenarios, benchmarks/flower/verdict.py the checks.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._common import describe_machine, make_parser
from benchmarks.flower.deployment import CheckFailed, open_deployment
from benchmarks.flower.scenarios import SCENARIOS
from benchmarks.flower.verdict import Outcome
from fedloom.utils.storage import write_atomically


def table(scenarios: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| fault | what happens | look for | lost updates | accuracy | s |", "|---|---|---|---|---|---|"]
    for row in scenarios:
        said = "; ".join(f"`{line}`" for line in row["said"])
        lost = f"{len(row['lost'])}" + (f", {row['late']} of them late" if row["late"] else "")
        cells = [row["fault"], row["happens"], said, lost, f"{row['accuracy']:.3f}", f"{row['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("flower-faults", __doc__)
    parser.add_argument(
        "--only", action="append", choices=list(SCENARIOS), help="run only this scenario; can be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    parser.add_argument("--keep", type=Path, help="keep logs and runs in this new folder")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a results file as a table; run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        print(table(json.loads(given.table.read_text())["scenarios"]), end="")
        return
    failures = 0
    with (
        tempfile.TemporaryDirectory(prefix="fedloom-faults-") as scratch,
        open_deployment(given.keep or Path(scratch)) as deployment,
    ):
        for name in given.only or SCENARIOS:
            start = time.monotonic()
            try:
                deployment.reset()
                found = SCENARIOS[name](deployment)
            except CheckFailed as error:
                failures += 1
                print(f"{name}: FAILED: {error}", flush=True)
                continue
            for row in found:
                row.seconds = round(time.monotonic() - start, 1)
                print(f"{row.scenario}: {row.fault}: {row.happens}; accuracy {row.accuracy}", flush=True)
                for line in row.said:
                    print(f"    {line}", flush=True)
            if given.out:
                update_results(given.out, name, found)
    sys.exit(1 if failures else 0)


def update_results(path: Path, name: str, found: Sequence[Outcome]) -> None:
    """Replace the rows of one scenario in a results file."""
    rows = json.loads(path.read_text())["scenarios"] if path.exists() else []
    rows = [row for row in rows if row["scenario"].partition("/")[0] != name] + [asdict(row) for row in found]
    order = list(SCENARIOS)
    rows.sort(key=lambda row: order.index(row["scenario"].partition("/")[0]))
    about = {"machine": describe_machine(), "scenarios": rows}
    write_atomically(path, (json.dumps(about, indent=1) + "\n").encode())
