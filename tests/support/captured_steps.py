"""Clients with custom steps, on the CUDA and the sequential engine."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedloom.engines.cuda.engine import CudaEngine
from fedloom.methods import Client, Method, Options, register
from fedloom.testing.fixtures import build_small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.cuda_engine import answers, assert_alike, cuda_of, dense, jobs_for

CLIENTS = (5, 0, 7, 2, 1, 6)


def as_plain(
    local: type[Client[Options]], clients: Sequence[int] = CLIENTS, slots: int = 1, **settings: Any
) -> CudaEngine:
    """Three rounds in one slot, or several, held against the sequential engine."""
    register(Method("own", "", "", client=local))
    values = {"engine": "sequential", "clients_per_round": 8, "batch_size": 4, "steps": 24, "model": dense, **settings}
    with build_small_run("own", {}, **values).engine_closed() as plain:
        engine = cuda_of(plain, slots)
        for round in range(3):
            jobs = jobs_for(plain, list(clients))
            assert_alike(answers(engine, jobs, round), answers(plain.engine, jobs, round))
    return engine


def scaled(bench: LocalTrainer, batch: Batch, factor: float) -> Tensor:
    """A step with a number of the host in it."""
    loss = bench.loss(batch)
    bench.backward(loss)
    bench.gradient.mul_(factor)
    bench.optimizer_step()
    return loss
