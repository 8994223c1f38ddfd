"""Compare the working tree with an old commit: `python -m tests.golden [PATTERN]`.

`make golden` compares all runs. Both trees run the same cases on this machine with this interpreter. The results of the
old commit are kept in `.golden/` by commit, versions, processor and case, so that each is made once.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.golden import values
from tests.golden.cases import BASE, CASES, QUICK_CASES, Case
from tests.golden.compare import Changes, compare
from tests.golden.runner import Result

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".golden"
CHANGES = Path(__file__).with_name("changes.toml")
SHOWN = 6
"""Differences shown of one case."""


def main() -> int:
    """Compare, or store."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="cases to play, such as 'fedcross/*'; by default all")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--store", action="store_true", help="write what make test expects on this kind of machine")
    given = parser.parse_args()
    wanted = [
        case
        for case in CASES.values()
        if not given.patterns or any(fnmatchcase(case.name, pattern) for pattern in given.patterns)
    ]
    if given.list or not wanted:
        print("\n".join(case.name for case in wanted) or f"no case is called {' or '.join(given.patterns)}")
        return 0 if wanted else 2
    changes = Changes.read(CHANGES)
    if given.store:
        results = dict(_play(ROOT / "src", [CASES[name] for name in QUICK_CASES], changes))
        print(f"{values.store(results)}: {len(results)} cases stored for {values.machine()}")
        return 0
    return hold(wanted, changes, everything=not given.patterns)


def hold(wanted: Sequence[Case], changes: Changes, everything: bool) -> int:
    """Play both trees and tell what differs; the exit code."""
    cases = [case for case in wanted if not case.needs or find_spec(case.needs)]
    skipped = [case for case in wanted if case not in cases]
    old, new = _old(cases), dict(_play(ROOT / "src", cases, changes))
    differ = 0
    for case in cases:
        found = compare(case.name, old[case.name], new[case.name], changes)
        differ += bool(found)
        if found:
            print(f"{case.name}:")
            print("\n".join(f"    {difference}" for difference in found[:SHOWN]))
            if len(found) > SHOWN:
                print(f"    and {len(found) - SHOWN} more")
    for case in skipped:
        print(f"{case.name}: skipped, {case.needs} is not installed here")
    # A few cases, or an environment without some packages, need not need every entry.
    unused = changes.unused() if everything else []
    for entry in unused:
        print(f"changes.toml: nothing needs {entry}")
    print(f"{len(cases) - differ} cases as {BASE}, {differ} otherwise, {len(skipped)} skipped")
    return 1 if differ or (unused and not skipped) else 0


def _old(cases: Sequence[Case]) -> dict[str, Result]:
    """What the old commit came to: from the cache, or played now."""
    source = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("runner", "draws", "files"))
    around = json.dumps([values.machine(), values.versions()]).encode()
    kept = KEPT / BASE / hashlib.sha256(around + source).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    places = {case.name: kept / f"{case.digest()[:32]}.json" for case in cases}
    missing = [case for case in cases if not places[case.name].exists()]
    if missing:
        for name, result in _play(_tree(), missing, None):
            part = places[name].with_suffix(".part")
            part.write_text(json.dumps(result))
            part.replace(places[name])
    return {name: json.loads(path.read_text()) for name, path in places.items()}


def _tree() -> Path:
    """The sources of the old commit."""
    tree = KEPT / BASE / "src"
    if not tree.exists():
        with tempfile.TemporaryDirectory(dir=KEPT) as place:
            archive = subprocess.run(["git", "archive", BASE, "src"], cwd=ROOT, stdout=subprocess.PIPE)
            if archive.returncode:
                raise SystemExit(f"golden: this clone has no commit {BASE}; fetch its whole history.")
            subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
            (Path(place) / "src").rename(tree)
    return tree


def _play(tree: Path, cases: Sequence[Case], changes: Changes | None) -> Iterator[tuple[str, Result]]:
    """Play cases with the fedloom of a tree, in a process of its own, and tell how long it took."""
    plans: dict[str, Any] = {}
    for case in cases:
        commands = [changes.command(words) if changes else list(words) for words in case.commands]
        plans[case.name] = {"commands": commands, "files": case.files, "stop": case.stop}
    began, before = time.perf_counter(), _cpu()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as place:
        paths = [str(tree), str(ROOT), str(Path(__file__).parent / "hook")]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.golden.runner", str(Path(place) / "runs")],
            cwd=ROOT,
            env=_environment(place) | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(plans))
        process.stdin.close()
        for line in process.stdout:
            record = json.loads(line)
            name, result = record["name"], record["result"]
            if result["runs"] and not result["draws"]:
                raise SystemExit(f"golden: nobody noted a draw of {tree}: `streams` in {CHANGES.name} must name them")
            times[name] = record["seconds"]
            if sys.stderr.isatty():
                print(f"\r{len(times)}/{len(plans)} {name:<40.40}", end="\r", file=sys.stderr, flush=True)
            yield name, result
        code = process.wait()
    if len(times) < len(plans):
        at = next(name for name in plans if name not in times)
        raise SystemExit(f"golden: {tree} ended with exit code {code} in {at}")
    slowest = ", ".join(f"{name} {times[name]:.1f} s" for name in sorted(times, key=times.__getitem__)[:-4:-1])
    wall, what = time.perf_counter() - began, "working tree" if changes else BASE
    print(f"{what}: {len(plans)} cases, {wall:.0f} s ({_cpu() - before:.0f} s of CPU); slowest: {slowest}", flush=True)


def _cpu() -> float:
    """Seconds that ended processes of this one have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(place: str) -> dict[str, str]:
    """Nothing of a user's own gets into a run."""
    own = ("FEDLOOM_", "PYTHON", "XDG_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(Path(place) / "cache"), "COLUMNS": "200"}


if __name__ == "__main__":
    sys.exit(main())
