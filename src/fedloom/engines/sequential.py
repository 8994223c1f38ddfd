"""The plain engine: one client after the other, in this process, on the CPU or a GPU.

Slow and obviously right: every other engine is tested against it. On the CPU it computes with one thread, like the
workers of the host engine, so that the two agree bit for bit.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.devices.cuda_runtime import is_out_of_memory_error
from fedloom.engines.base import Engine, raise_insufficient_memory
from fedloom.errors import describe_error
from fedloom.training.local_training import EngineContext, evaluate_clients_in_turn, train_client
from fedloom.training.trainer import LocalTrainer


class SequentialEngine(Engine):
    """One bench, one client at a time."""

    name = "plain"

    def __init__(self, shop: EngineContext, device: torch.device | str = "cpu") -> None:
        super().__init__(shop)
        self.device = self.homes.device = torch.device(device)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._bench = LocalTrainer(shop.workshop, self.device)
        self._row = shop.workshop.layout.empty(self.device)

    def train(self, round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        shop = self.shop.workshop
        for job in jobs:
            home = self.homes.copy_for(job.client, self.device)
            uploads = {
                name: torch.zeros(shape, dtype=shop.layout.dtype, device=self.device)
                for name, shape in shop.uploads.items()
            }
            try:
                samples, loss, steps = train_client(
                    self._bench,
                    self.shop,
                    round,
                    job.client,
                    self._row,
                    job.row.to(self.device),
                    {name: tensor.to(self.device) for name, tensor in job.extras.items()},
                    home,
                    uploads,
                    job.client not in self.homes,
                )
            except (Exception, SystemExit) as error:  # whatever a client's code does, the round goes on without it
                if is_out_of_memory_error(error):  # it is not the client's fault, and would be the next one's too
                    raise_insufficient_memory(error)
                yield ClientFailure(job, describe_error(error))
                continue
            yield ClientUpdate(job, self._row, samples, loss, steps, uploads, home)

    def score(self, row: Tensor) -> EvaluationResult | None:
        test = self.shop.federation.test
        if test is None or not len(test):
            return None
        pieces = [self._bench.score(row, test[chunk]) for chunk in evaluation_slices(test)]
        return sum(pieces[1:], start=pieces[0])

    def score_clients(self, round: int, jobs: Sequence[ClientTask]) -> list[float | None]:
        return evaluate_clients_in_turn(self._bench, self.shop, self.homes, round, jobs)

    def close(self) -> None:
        torch.set_num_threads(self._threads)
