"""Flower's simulation: FedAvg on Ray actors with one CPU each, one actor per core."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.peers.job import Job, RoundClock, train_client

FOLDER = "FEDLOOM_PEERS_FOLDER"


@cache
def _actor_state() -> tuple[Job, list[tuple[Tensor, Tensor]], nn.Module]:
    """Return the job, the data and the network, which an actor keeps from one client to the next."""
    job = Job(Path(os.environ[FOLDER]))
    return job, job.client_data(), job.network()


def _train_client(message: Message, context: Context) -> Message:
    job, data, module = _actor_state()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data[int(context.node_config["partition-id"])]
    steps = train_client(module, x, y, job.settings)
    metrics = MetricRecord({"num-examples": len(x), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)


class _TimedFedAvg(FedAvg):
    """FedAvg that measures its rounds and counts the steps of the clients."""

    def __init__(self, clock: RoundClock, **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.steps = clock, 0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.steps += sum(int(reply.content["metrics"]["steps"]) for reply in replies)
        aggregated = super().aggregate_train(server_round, replies)
        self.clock.end_round()
        return aggregated


def train(job: Job, clock: RoundClock) -> tuple[dict[str, Tensor], int]:
    """Train, and return the weights and the number of steps."""
    settings, cores = job.settings, len(os.sched_getaffinity(0))
    os.environ[FOLDER] = str(job.folder)
    strategy = _TimedFedAvg(
        clock,
        fraction_train=settings.clients_per_round / settings.clients,
        fraction_evaluate=0.0,
        min_available_nodes=settings.clients,
    )
    server, client, found = ServerApp(), ClientApp(), list[dict[str, Tensor]]()
    client.train()(_train_client)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        initial = ArrayRecord(job.network().state_dict())
        result = strategy.start(grid, initial, num_rounds=settings.rounds + 1)
        found.append(dict(result.arrays.to_torch_state_dict()))

    torch.manual_seed(settings.seed)
    run_simulation(
        server,
        client,
        num_supernodes=settings.clients,
        backend_config={"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return found[0], strategy.steps
