"""Kill runs with SIGKILL at random times, resume them, and compare digests."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

METHODS = (
    "fedavg", "scaffold", "fedcross", "fedmr", "fedcda", "lss", "dynafed", "fedprox+fedcross", "feddyn", "fedrep",
)  # fmt: skip
OPTIONS = {
    "fedcda": ["--set", "fedcda.warmup=2", "--set", "fedcda.K=2"],
    "dynafed": [
        f"--set=dynafed.{text}" for text in ("L=3", "s=1", "inner_steps=2", "iterations=5", "images_per_class=1")
    ],
}
SMALL = ["--clients", "10", "--clients-per-round", "5", "--rounds", "8", "--workers", "2", "--quiet"]


def start(words: Sequence[str], log: Path) -> int:
    """Start a command in a forked process, which has PyTorch loaded already. Return its process ID."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from fedloom.cli.main import main as command

        command(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(words: Sequence[str], log: Path) -> float:
    """Run a command to its end. Return its seconds."""
    began = time.monotonic()
    _, status = os.waitpid(start(words, log), 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {status}: {log.read_text()[-1000:]}")
    return time.monotonic() - began


def digest(run: Path) -> str:
    """Return the digest of a finished run."""
    return str(json.loads((run / "summary.json").read_text())["digest"])


def attack(method: str, kills: int, draw: random.Random, place: Path) -> tuple[int, int]:
    """Kill runs of one method until there were `kills` kills. Return the number of kills and of finished runs."""
    log, whole = place / "log", place / "whole"
    command = ["run", method, *SMALL, *OPTIONS.get(method, ())]
    if method == "fedcda":
        command += ["--cache-dir", str(place / "rows")]
    seconds = finish([*command, "--out", str(whole)], log)
    done = finished = 0
    while done < kills:
        run = place / f"run-{finished}"
        every = ["--checkpoint-seconds", draw.choice(["0", "0.2", "30"])]
        for attempt in range(4):  # then it may finish
            goes_on = (run / "config.toml").exists()
            words = ["resume", str(run), "--quiet"] if goes_on else [*command, *every, "--out", str(run)]
            child = start(words, log)
            if attempt < 3 and done < kills:
                time.sleep(draw.uniform(0, 0.9 * seconds))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            done += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status):
                if status:
                    raise SystemExit(f"{method}: {' '.join(words)} failed: {log.read_text()[-1000:]}")
                break
        if not (run / "summary.json").exists():
            finish(["resume", str(run), "--quiet"], log)
        if digest(run) != digest(whole):
            raise SystemExit(f"{method}: {run} has another digest than the undisturbed run")
        shutil.rmtree(run)
        finished += 1
    return done, finished


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill runs of all methods and print how many kills and runs there were."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills in total (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times (default: 0)")
    given = parser.parse_args(arguments)
    import fedloom.runs.compare  # noqa: F401 - what every forked process needs

    draw, kills = random.Random(given.seed), 0
    for number, method in enumerate(METHODS):
        share = given.kills * (number + 1) // len(METHODS) - given.kills * number // len(METHODS)
        with tempfile.TemporaryDirectory() as place:
            done, finished = attack(method, share, draw, Path(place))
        kills += done
        print(f"{method:<18}{done:>4} kills, {finished} runs with the same digest", flush=True)
    print(f"{kills} kills, all digests identical")


if __name__ == "__main__":
    main()
