"""Run every method on the same tasks with the same budget, for docs/league.md.

    python -m benchmarks league --work runs/league --out results/league.json
    python -m benchmarks league --print results/league.json
    python -m benchmarks league --write docs/league.md

The first command makes all runs, `--processes` at a time with one thread each, at the lowest priority. Each finished
run is a small file in the work folder. After a stop the same command continues. It repeats a run only if the settings
or the code of its method have changed. The second command prints the tables, the third writes them into the page.

benchmarks/league/rows.py has the tasks and the rows of the table with their hyperparameters.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloom
from benchmarks._common import command_of, describe_machine, make_parser
from benchmarks.league import tables
from benchmarks.league.rows import COMMON, PARTITIONS, SLOW, TASKS, Row, Task, rows
from fedloom import data as datasets
from fedloom.core.rng import RngStreams
from fedloom.data import PartitionedDataset
from fedloom.engines.base import Engine
from fedloom.methods import MethodContext, Server, methods
from fedloom.methods.registry import BUILT_IN
from fedloom.runs import round as round_module
from fedloom.utils.storage import write_atomically


@dataclass(frozen=True)
class PlannedRun:
    """One run of the table."""

    task: Task
    partition: str
    row: Row
    seed: int
    rounds: int

    @property
    def file(self) -> str:
        """The name of its file in the work folder."""
        name = f"{self.task.data}-{self.partition}-{self.row.name}-seed{self.seed}"
        return re.sub(r"[^A-Za-z0-9.-]+", "_", name) + ".json"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run without its method."""
        return {**COMMON, **self.task.settings, "seed": self.seed, "rounds": self.rounds}

    def federated_data(self) -> PartitionedDataset:
        """Return the data of the clients and the server: the same for every method."""
        dataset, streams = datasets.load_dataset(self.task.data), RngStreams(self.seed)
        order = streams.numpy("league").permutation(len(dataset.train))
        used = self.task.samples or len(order)
        server, rest = order[: used // 20], order[used:]
        held = np.sort(np.concatenate([server, rest]))
        pooled = datasets.partition_dataset(
            dataset, self.partition, self.task.settings["clients"], streams.numpy("partition"), held
        )
        pooled.server_data = dataset.train.take(np.sort(server))
        return pooled

    def key(self) -> str:
        """Return a digest of the settings and the method's options; `code_of` covers the code."""
        return digest(
            {
                "settings": self.settings(),
                "samples": self.task.samples,
                "on": self.partition,
                "row": [self.row.method, self.row.options],
            }
        )


def digest(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


METHODS = Path(fedloom.__file__).parent / "methods"
RELEVANT = ("options", "server", "client", "extras", "refiner", "defaults")
"""The arguments of `Method` that change what a method does."""


def code_of(method: str) -> str:
    """Return a digest of a method's code: its file, that of FedAvg, and the files of fedloom.methods that they import.

    Comments, docstrings, descriptions of the method and the code that all methods share do not count.
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
                    body[:] = [each for each in body if not _is_docstring(each)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Method":
                node.keywords = [each for each in node.keywords if each.arg in RELEVANT]
        found[name] = ast.dump(tree)
        todo -= {*found, "base", "registry", "composition"}
    return digest(found)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


CODE: dict[str, str] = {}
"""Digests of the methods as this process imported them; the files may change later."""


def start_worker(parent: int) -> None:
    """Prepare a worker process before its first run."""
    os.nice(19)
    torch.set_num_threads(1)
    methods()
    round_module._evaluate_personal_models = evaluate_personal_models_last
    CODE.update({name: code_of(name) for name in BUILT_IN})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # the parent was killed

    threading.Thread(target=watch, daemon=True).start()


_evaluate_personal_models = round_module._evaluate_personal_models


def evaluate_personal_models_last(
    engine: Engine, server: Server[Any], context: MethodContext, done: int, row: torch.Tensor
) -> dict[str, Any]:
    """Evaluate personal models after the last round only: with fine-tuning this takes longer than training."""
    return _evaluate_personal_models(engine, server, context, done, row) if done == context.planned_rounds else {}


def run_one(job: PlannedRun) -> dict[str, Any]:
    """Make a run and return its record, or the reason of its failure."""
    record: dict[str, Any] = {
        "data": job.task.data,
        "partition": job.partition,
        "row": job.row.name,
        "seed": job.seed,
        "key": job.key(),
        "code": CODE[job.row.method],
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
    folder = Path(tempfile.mkdtemp(prefix="fedloom-league-"))
    start = time.process_time()
    try:
        run = fedloom.run(
            job.row.method,
            job.federated_data(),
            options=job.row.options,
            server_data="own",
            out=folder / "run",
            report=False,
            checkpoint_seconds=1e9,
            **job.settings(),
        )
        record["seconds"] = round(time.process_time() - start, 2)
        evaluated = [each for each in run.history if "accuracy" in each]
        record["rounds"] = [each["round"] for each in evaluated]
        record["accuracy"] = [round(each["accuracy"], 4) for each in evaluated]
        record["worst"] = [round(each["client_accuracy_worst10"], 4) for each in evaluated]
        last = evaluated[-1]  # the tables say "after the last round"
        record["clients"] = round(last["client_accuracy_mean"], 4)
        record |= {key: run.summary[key] for key in ("bytes_down", "bytes_up", "digest")}
        record["failed"] = run.summary["failed"]
        if (mean := last.get("personal_accuracy_mean")) is not None:
            record["personal"] = [round(mean, 4), round(last["personal_accuracy_worst10"], 4)]
    except Exception as error:  # the table shows every failure
        record["failure"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return record


def plan(options: argparse.Namespace) -> list[PlannedRun]:
    """Return all runs by data set and seed, with the slow rows at the end."""
    jobs = [
        PlannedRun(task, partition, row, seed, options.rounds)
        for task in TASKS
        for seed in range(options.seeds)
        for partition in options.partitions
        for row in rows(task)
        if task.data in options.data and (not options.only or row.name in options.only)
    ]
    return sorted(jobs, key=lambda job: SLOW.index(job.row.name) + 1 if job.row.name in SLOW else 0)


def finished(job: PlannedRun, work: Path) -> dict[str, Any] | None:
    """Return the record of a finished run with the same settings and code, or None."""
    try:
        record: dict[str, Any] = json.loads((work / job.file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    same = (record["key"], record["code"]) == (job.key(), code_of(job.row.method))
    return record if same and "failure" not in record else None


def run_missing(jobs: list[PlannedRun], work: Path, processes: int) -> None:
    """Make the runs that are not finished, and write a file for each."""
    total = len(jobs)
    jobs = [job for job in jobs if finished(job, work) is None]
    print(f"{total} runs, {total - len(jobs)} of them finished", flush=True)
    context, start = multiprocessing.get_context("spawn"), time.monotonic()
    with ProcessPoolExecutor(processes, context, start_worker, (os.getpid(),)) as pool:
        waiting = {pool.submit(run_one, job): job for job in jobs}
        for number, future in enumerate(as_completed(waiting), 1):
            job, record = waiting[future], future.result()
            write_atomically(work / job.file, json.dumps(record).encode())
            outcome = record.get("failure") or f"{100 * record['accuracy'][-1]:.1f} %, {record['seconds']} s"
            print(f"[{number}/{len(jobs)}, {time.monotonic() - start:.0f} s] {job.file[:-5]}: {outcome}", flush=True)


def write_results(jobs: list[PlannedRun], options: argparse.Namespace) -> None:
    """Write the finished runs, by data set, into one file."""
    files = [options.work / job.file for job in sorted(jobs, key=lambda job: TASKS.index(job.task))]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    options.out.write_text(tables.dump(result_of(records, len(jobs), options)), encoding="utf-8")


def result_of(records: list[dict[str, Any]], planned: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results: how they were made, the tasks, the source of each row, and the runs."""
    tasks = [task for task in TASKS if task.data in options.data]
    return {
        "command": command_of("league", options.chosen),
        "made with": {"fedloom": fedloom.__version__, **describe_machine()},
        "tasks": {
            task.data: {**COMMON, **task.settings, "rounds": options.rounds, "samples": task.samples} for task in tasks
        },
        "sources": {row.name: row.source for row in rows(TASKS[0])},
        "planned": planned,
        "runs": records,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `chosen` are its options that change the results."""
    parser = make_parser("league", __doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/league"), help="folder of the finished runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the results of all runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="concurrent runs, one thread each")
    parser.add_argument("--data", nargs="+", default=[task.data for task in TASKS], help="data sets")
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), help="partitions")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these rows of the table")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=COMMON["rounds"], help="rounds of a run")
    parser.add_argument("--so-far", action="store_true", help="write --out from the finished runs; run nothing")
    parser.add_argument("--print", type=Path, metavar="FILE", help="print the tables of a results file; run nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables of --out into a page; run nothing")
    options = parser.parse_args(arguments)
    known = {row.name for row in rows(TASKS[0])}
    for name in options.only:
        if name not in known:
            parser.error(f"there is no row {name!r}; the rows are {', '.join(sorted(known))}.")
    for name in options.data:
        if name not in {task.data for task in TASKS}:
            parser.error(f"there is no task {name!r}; the tasks are {', '.join(task.data for task in TASKS)}.")
    options.chosen = []
    for name in ("data", "partitions", "only", "seeds", "rounds"):
        value = getattr(options, name)
        if value != parser.get_default(name):
            options.chosen += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.print is not None:
        print(tables.text(json.loads(options.print.read_text(encoding="utf-8"))), end="")
    elif options.write is not None:
        results = json.loads((options.out or Path("results/league.json")).read_text(encoding="utf-8"))
        tables.write_into(options.write, results)
    else:
        jobs = plan(options)
        if not options.so_far:
            run_missing(jobs, options.work, options.processes)
        if options.out is not None:
            write_results(jobs, options)
