"""Compare the CUDA engine with a plain loop and with the sequential engine."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.cuda.setting import usable_engine, with_engine
from benchmarks.cuda.table import ResultTable, TimeLimit
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.methods import methods
from fedloom.testing.fixtures import build_small_run
from tests.support import cuda_agreement as against_loop


def agreement(options: argparse.Namespace, table: ResultTable, limit: TimeLimit) -> None:
    """Compare one round of each network with a plain PyTorch loop."""
    device = options.device
    for model in limit.until_over(["lenet"] if options.tiny else list(against_loop.NETWORKS)):
        found: dict[str, Any] = {}
        for double in (False, True):
            name = "float64" if double else "float32"
            with against_loop.experiment_of(model, device, double).engine_closed() as experiment:
                jobs, floats = against_loop.jobs_of(experiment), experiment.layout.floats
                loop = against_loop.trained_by_a_loop(experiment, jobs, device)
                rows, replayed = against_loop.trained_at_once(experiment, jobs, device)
                found[f"{name}, to a plain loop"] = against_loop.apart(rows, loop, floats)
                plain = against_loop.trained(experiment.engine, jobs)
                found[f"{name}, to the sequential engine"] = against_loop.apart(rows, plain, floats)
                draw = torch.Generator(device).manual_seed(0)
                moved = [replace(job, row=job.row.clone()) for job in jobs]
                for job in moved:
                    weights = job.row[: experiment.layout.trainable]
                    noise = torch.randn(weights.shape, generator=draw, device=device, dtype=weights.dtype)
                    weights.mul_(1 + 1e-7 * noise)
                astray = against_loop.trained_by_a_loop(experiment, moved, device)
                found[f"{name}, the loop from a start moved by 1e-7"] = against_loop.apart(astray, loop, floats)
                found[f"{name}, steps replayed"] = replayed
        table.put("agreement", model, found)


def every_method(options: argparse.Namespace, table: ResultTable, limit: TimeLimit) -> None:
    """Compare two rounds of every method with the sequential engine."""
    for method in limit.until_over(["fedavg", "scaffold"] if options.tiny else sorted(methods())):
        rows, replayed = [], 0
        for engine in ("sequential", "cuda"):
            given = {
                "device": options.device,
                "precision": "fp32",
                "momentum": 0.5,
                "engine": usable_engine(engine, options),
            }
            experiment = build_small_run(method, {}, **given, model=small_network)
            with with_engine(experiment, engine).engine_closed():
                failed = [experiment.rounds.run_round(round)["failed"] for round in range(2)]
                rows.append(experiment.rounds.parts.server.global_model()[: experiment.layout.floats].clone())
                if isinstance(experiment.engine, CudaEngine):
                    replayed = sum(slot.graph_runner.replayed for slot in experiment.engine.slots)
        away = float(torch.linalg.vector_norm(rows[0] - rows[1]) / torch.linalg.vector_norm(rows[0]))
        table.put("methods", method, {"away": away, "steps replayed": replayed, "clients lost": sum(failed)})


def small_network() -> nn.Module:
    return against_loop.in_double(nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))
