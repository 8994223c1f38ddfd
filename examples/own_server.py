"""A server method of your own: the next model is the mean over several rounds."""

import torch
from pydantic import Field
from torch import Tensor

from fedloom import AveragingServer, Options, register


class MemoryOptions(Options):
    rounds: int = Field(3, ge=1)
    """number of rounds whose means are averaged; 1 is FedAvg"""


@register("my-memory", reference="examples/own_server.py", neutral={"rounds": 1})
class MemoryServer(AveragingServer[MemoryOptions]):
    """Average the means of the last rounds."""

    def start(self) -> None:
        self.means: list[Tensor] = []

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        self.means = [*self.means, mean.clone()][-self.options.rounds :]
        return torch.stack(self.means).mean(0)

    def diagnostics(self) -> dict[str, float]:
        return {"spread": float((self.means[0] - self.means[-1]).norm()) if self.means else 0.0}
