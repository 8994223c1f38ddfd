"""Every method on the same tasks with the same budget: the league table of docs/league.md.

    python benchmarks/league.py --work runs/league --out results/league.json
    python benchmarks/league.py --print results/league.json
    python benchmarks/league.py --write docs/league.md

The first command makes all runs, `--processes` at a time with one thread each, at the lowest priority. A finished run
is one small file in the work folder, so a table that was killed goes on where it was, and a run is made again when the
code of its method or its settings have changed since. The second prints the tables, the third puts them into the page.

Tasks and lines, with their hyper-parameters, are in league_rows.py.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import league_tables
import numpy as np
import torch
from league_rows import COMMON, PARTITIONS, SLOW, TASKS, Row, Task, rows

import fedloom
from fedloom import data as datasets
from fedloom.core.rng import RngStreams
from fedloom.data import PartitionedDataset
from fedloom.methods import methods
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.round import RoundRunner
from fedloom.utils.storage import write_atomically


@dataclass(frozen=True)
class Job:
    """One run of the table."""

    task: Task
    partition: str
    row: Row
    seed: int
    rounds: int

    @property
    def file(self) -> str:
        name = f"{self.task.data}-{self.partition}-{self.row.name}-seed{self.seed}"
        return re.sub(r"[^A-Za-z0-9.-]+", "_", name) + ".json"

    def settings(self) -> dict[str, Any]:
        return {**COMMON, **self.task.settings, "seed": self.seed, "rounds": self.rounds}

    def federation(self) -> PartitionedDataset:
        """The clients' data, and the server's: the same for every method."""
        dataset, streams = datasets.load_dataset(self.task.data), RngStreams(self.seed)
        order = streams.numpy("league").permutation(len(dataset.train))
        used = self.task.samples or len(order)
        server, left = order[: used // 20], order[used:]
        held = np.sort(np.concatenate([server, left]))
        pooled = datasets.partition_dataset(
            dataset, self.partition, self.task.settings["clients"], streams.numpy("partition"), held
        )
        pooled.server_data = dataset.train.take(np.sort(server))
        return pooled

    def key(self) -> str:
        """What the result depends on: settings, options, and the code of the method."""
        return digest(
            {
                "settings": self.settings(),
                "samples": self.task.samples,
                "on": self.partition,
                "row": [self.row.method, self.row.options],
            }
        )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


METHODS = Path(fedloom.__file__).parent / "methods"
MATTERS = ("options", "server", "local", "companion", "refiner", "defaults")
"""What a method's entry in the catalogue says that changes what it does."""


def code_of(method: str) -> str:
    """A digest of the method's code: its file, FedAvg's, and the files of fedloom.methods that they import.

    Comments, docstrings and the words of the catalogue do not count, and neither does the frame that all methods share.
    """
    found: dict[str, str] = {}
    todo = {BUILT_IN[method], "fedavg"}
    while todo:
        name = todo.pop()
        tree = ast.parse((METHODS / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom.methods."):
                todo.add(str(node.module).removeprefix("fedloom.methods.").replace(".", "/"))
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(body, list):
                    body[:] = [each for each in body if not _says_something(each)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Method":
                node.keywords = [each for each in node.keywords if each.arg in MATTERS]
        found[name] = ast.dump(tree)
        todo -= {*found, "base", "registry", "composition"}
    return digest(found)


def _says_something(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


CODE: dict[str, str] = {}
"""Digests of the methods as this process imported them: files may change while it works."""


def begin(parent: int) -> None:
    """In every worker, before its first run."""
    os.nice(19)
    torch.set_num_threads(1)
    methods()
    RoundRunner._score_personal = at_the_end  # type: ignore[method-assign, assignment]
    CODE.update({name: code_of(name) for name in BUILT_IN})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # killed: nobody waits for the result

    threading.Thread(target=watch, daemon=True).start()


_score_personal = RoundRunner._score_personal


def at_the_end(rounds: RoundRunner, played: int, row: torch.Tensor) -> dict[str, Any]:
    """Scores of the clients' own models after the last round alone: with fine-tuning they take longer than training."""
    return _score_personal(rounds, played, row) if played == rounds.config.rounds else {}


def play(job: Job) -> dict[str, Any]:
    """Make a run, and say what came out, or why nothing did."""
    record: dict[str, Any] = {
        "data": job.task.data,
        "partition": job.partition,
        "row": job.row.name,
        "seed": job.seed,
        "key": job.key(),
        "code": CODE[job.row.method],
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
    place = Path(tempfile.mkdtemp(prefix="fedloom-league-"))
    start = time.process_time()
    try:
        run = fedloom.run(
            job.row.method,
            job.federation(),
            options=job.row.options,
            server_data="own",
            out=place / "run",
            report=False,
            checkpoint_seconds=1e9,
            **job.settings(),
        )
        record["seconds"] = round(time.process_time() - start, 2)
        scored = [each for each in run.history if "accuracy" in each]
        record["rounds"] = [each["round"] for each in scored]
        record["accuracy"] = [round(each["accuracy"], 4) for each in scored]
        record["worst"] = [round(each["client_accuracy_worst10"], 4) for each in scored]
        record["clients"] = round(run.summary["client_accuracy_mean"], 4)
        record |= {key: run.summary[key] for key in ("bytes_down", "bytes_up", "lost", "digest")}
        if (mean := run.summary["personal_accuracy_mean"]) is not None:
            record["personal"] = [round(mean, 4), round(run.summary["personal_accuracy_worst10"], 4)]
    except Exception as error:  # whatever it is, it belongs into the table
        record["failure"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return record


def plan(options: argparse.Namespace) -> list[Job]:
    """All runs: data set by data set and seed by seed, the slow lines at the end."""
    jobs = [
        Job(task, partition, row, seed, options.rounds)
        for task in TASKS
        for seed in range(options.seeds)
        for partition in options.partitions
        for row in rows(task)
        if task.data in options.data and (not options.only or row.name in options.only)
    ]
    return sorted(jobs, key=lambda job: SLOW.index(job.row.name) + 1 if job.row.name in SLOW else 0)


def finished(job: Job, work: Path) -> dict[str, Any] | None:
    """The record of a run that is done, of these settings and with the method's code as it is now."""
    try:
        record: dict[str, Any] = json.loads((work / job.file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    same = (record["key"], record["code"]) == (job.key(), code_of(job.row.method))
    return record if same and "failure" not in record else None


def carry_out(jobs: list[Job], work: Path, processes: int) -> None:
    """Make the runs that are not done yet; each is written down as soon as it is."""
    total = len(jobs)
    jobs = [job for job in jobs if finished(job, work) is None]
    print(f"{total} runs, of which {total - len(jobs)} are done", flush=True)
    context, start = multiprocessing.get_context("spawn"), time.monotonic()
    with ProcessPoolExecutor(processes, context, begin, (os.getpid(),)) as pool:
        waiting = {pool.submit(play, job): job for job in jobs}
        for number, future in enumerate(as_completed(waiting), 1):
            job, record = waiting[future], future.result()
            write_atomically(work / job.file, json.dumps(record).encode())
            outcome = record.get("failure") or f"{100 * record['accuracy'][-1]:.1f} %, {record['seconds']} s"
            print(f"[{number}/{len(jobs)}, {time.monotonic() - start:.0f} s] {job.file[:-5]}: {outcome}", flush=True)


def write(jobs: list[Job], options: argparse.Namespace) -> None:
    """Put what is done of these runs, data set by data set, into one file."""
    files = [options.work / job.file for job in sorted(jobs, key=lambda job: TASKS.index(job.task))]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    options.out.write_text(league_tables.dump(result_of(records, len(jobs), options)), encoding="utf-8")


def result_of(records: list[dict[str, Any]], planned: int, options: argparse.Namespace) -> dict[str, Any]:
    tasks = [task for task in TASKS if task.data in options.data]
    return {
        "command": f"python benchmarks/league.py {options.line}".rstrip(),
        "made with": {"fedloom": fedloom.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "tasks": {
            task.data: {**COMMON, **task.settings, "rounds": options.rounds, "samples": task.samples} for task in tasks
        },
        "sources": {row.name: row.source for row in rows(TASKS[0])},
        "planned": planned,
        "runs": records,
    }


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every method on the same tasks with the same budget.")
    parser.add_argument("--work", type=Path, default=Path("runs/league"), help="folder of the runs that are done")
    parser.add_argument("--out", type=Path, help="file for the results of all runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--data", nargs="+", default=[task.data for task in TASKS])
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS))
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these lines of the table")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=COMMON["rounds"])
    parser.add_argument("--so-far", action="store_true", help="write --out from the runs that are done; run nothing")
    parser.add_argument("--print", type=Path, metavar="FILE", help="print the tables of such results, and run nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables of --out into a page; run nothing")
    options = parser.parse_args(words)
    known = {row.name for row in rows(TASKS[0])}
    for name in options.only:
        if name not in known:
            parser.error(f"there is no line {name!r}; there are {', '.join(sorted(known))}.")
    for name in options.data:
        if name not in {task.data for task in TASKS}:
            parser.error(f"there is no task {name!r}; there are {', '.join(task.data for task in TASKS)}.")
    chosen = {
        "--data": "data",
        "--partitions": "partitions",
        "--only": "only",
        "--seeds": "seeds",
        "--rounds": "rounds",
    }
    given = {
        flag: getattr(options, name)
        for flag, name in chosen.items()
        if getattr(options, name) != parser.get_default(name)
    }
    flat = {flag: value if isinstance(value, list) else [str(value)] for flag, value in given.items()}
    options.line = shlex.join(word for flag, values in flat.items() for word in (flag, *values))
    return options


def main(words: list[str]) -> None:
    options = parse(words)
    if options.print is not None:
        print(league_tables.text(json.loads(options.print.read_text(encoding="utf-8"))), end="")
    elif options.write is not None:
        results = json.loads((options.out or Path("results/league.json")).read_text(encoding="utf-8"))
        league_tables.into(options.write, results)
    else:
        jobs = plan(options)
        if not options.so_far:
            carry_out(jobs, options.work, options.processes)
        if options.out is not None:
            write(jobs, options)


if __name__ == "__main__":
    main(sys.argv[1:])
