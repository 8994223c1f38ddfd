"""FedGen's generator of representations, and what the server trains it with (see fedgen.py)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.errors import InputError
from fedloom.methods.base import Context
from fedloom.methods.heads import find_head
from fedloom.rows import Kind, Layout


class Generator(nn.Module):
    """G: noise and a label to a representation. Its models are rows like any other."""

    def __init__(self, noise: int, classes: int, hidden: int, latent: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.classes = classes
        self.inner = nn.Linear(noise + classes, hidden, dtype=dtype)
        self.norm = nn.BatchNorm1d(hidden, dtype=dtype)
        self.outer = nn.Linear(hidden, latent, dtype=dtype)
        self.layout = Layout.of(self)
        self._entries = [entry for entry in self.layout.entries if entry.kind is not Kind.INTEGER]

    @classmethod
    def fit(cls, context: Context, noise: int, hidden: int) -> "Generator":
        """A new generator for the network of a run, always the same."""
        if not context.classes:
            raise InputError("fedgen generates representations for classes, and these data have none.")
        _, head = find_head(context.make_module(), "fedgen")
        with context.streams.globally("fedgen"):
            generator = cls(noise, context.classes, hidden, head.in_features, context.layout.dtype)
        return generator.to(context.device)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        given = torch.cat([noise, F.one_hot(y, self.classes).to(noise)], 1)
        made: Tensor = self.outer(self.norm(self.inner(given)).relu())
        return made

    def at(self, parameters: Tensor, statistics: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        """What a generator makes whose parameters lie in one row and whose statistics of batch norm in another."""
        rows = {Kind.PARAMETER: parameters, Kind.BUFFER: statistics}
        made: Tensor = functional_call(self, {e.name: e.view(rows[e.kind]) for e in self._entries}, (noise, y))
        return made

    def lesson(
        self, row: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The server's loss of the generator in `row` and its gradient; the statistics in `row` take the batch in."""
        parameters = row[: self.layout.trainable].detach().requires_grad_()
        # `.data`: batch norm writes its statistics there, which autograd would take for a change of the parameters.
        loss = generator_loss(self.at(parameters, row.data, noise, y), noise, y, heads, counts)
        (gradient,) = torch.autograd.grad(loss, parameters)
        return loss.detach(), gradient


def label_weights(counts: Tensor) -> Tensor:
    """a: the share of each client (row) in each class (column); 0 for a class that nobody has."""
    counts = counts.clamp(min=0)
    total = counts.sum(0)
    return counts / torch.where(total > 0, total, 1.0)


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """Small where different noise makes different representations, 1 where all are the same."""
    apart = (noise[:, None] - noise).square().mean(2) * (made[:, None] - made).abs().mean(2)
    return apart.mean().neg().exp()


def generator_loss(
    made: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], counts: Tensor
) -> Tensor:
    """The server's loss of representations `made` for labels `y`; `counts` are the labels of the clients of `heads`."""
    loss = diversity(noise, made)
    for head, a in zip(heads, label_weights(counts), strict=True):
        wrong = F.cross_entropy(F.linear(made, head["weight"], head.get("bias")), y, reduction="none")
        loss = loss + (a[y] * wrong).mean()
    return loss
