"""A client of Local Superior Soups with a trainer, member by member."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import Samples
from fedloom.methods import lss
from fedloom.methods.base import MethodContext
from fedloom.methods.lss import LSSClient, LSSOptions
from fedloom.training.trainer import LocalTrainer
from tests.support.trainers import context_of

CONTEXT: MethodContext = None  # type: ignore[assignment]  # a Local asks the run for nothing
AUTHORS = {"distance": "squared", "spread": "volume", "affinity": 0.01, "diversity": 0.005, "include_init": False}
"""The shape of the authors' code, with coefficients for which there is a minimum."""


class Widen(nn.Module):
    """Samples come in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def network(*middle: nn.Module) -> nn.Module:
    """A network in float64, so that what should be equal can be told from what is nearly so."""
    return nn.Sequential(Widen(), nn.Linear(5, 4), *middle, nn.Linear(4, 3)).double()


def seat(count: int = 40, module: nn.Module | None = None, **options: Any) -> LocalTrainer:
    """A bench with a client on it."""
    torch.manual_seed(0)
    module = module or network(nn.Tanh())
    layout, training = Layout.of(module), TrainingConfig(**{"batch_size": 10, "epochs": 1, "lr": 0.1, **options})
    bench = LocalTrainer(context_of(module, training, classes=3))
    samples = Samples(torch.randn(count, 5), torch.arange(count) % 3)
    received = layout.read(module)
    bench.start_task(ClientTask(0, received, round=0), TaskMemory(layout.empty()), samples)
    return bench


def soup(**options: Any) -> LSSClient:
    return LSSClient(CONTEXT, LSSOptions(**options))


def grow(local: LSSClient, bench: LocalTrainer, look: Callable[[int], None] = lambda i: None) -> Tensor:
    """Train the client; `look(i)` is called when member i has been trained. The trained members."""
    for i, piece in enumerate(local.train(bench)):
        bench.run_steps(piece)
        torch.sub(bench.weights, bench.received[: bench.layout.trainable], out=bench.scratch["rows"][i])
        look(i)
    return bench.received[: bench.layout.trainable] + bench.scratch["rows"]


@contextmanager
def forced(weights: Callable[[int], Tensor]) -> Iterator[list[int]]:
    """Interpolate with these weights; the sizes that were asked for."""
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lss, "lss_simplex_weights", lambda count, like: asked.append(count) or weights(count).to(like))
        yield asked
