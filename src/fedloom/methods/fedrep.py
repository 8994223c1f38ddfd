"""FedRep: clients share a body, and each client keeps its own head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

The server sends the body. A client fits its own head for some epochs with the body frozen, then trains the body for
some epochs with the head frozen, and sends the body. The server averages the bodies, weighted by samples. After the
last round every client fits its head once more.

Frozen parameters do not change by a single bit: their gradient is zero, and weight decay and momentum do not move them.
While the body is frozen, its batch norms use their statistics and do not update them. Each phase has a new optimizer.

Not specified in the paper: the head is the layer called `head`, or else the last one with parameters. A client that
never trained starts with the initial head. The global model has the mean of the clients' heads, weighted by samples.
Each client is evaluated with its own head, fitted once more after the last round as in the authors' code.
"""

from collections.abc import Iterator
from typing import TypeVar

from pydantic import Field
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedRepOptions(Options):
    head_epochs: int = Field(10, ge=0)
    """epochs in which a client fits its head, before it trains the body"""
    body_epochs: int = Field(1, ge=0)
    """epochs in which a client trains the body, with its head frozen; --epochs is not used"""
    final_epochs: int = Field(10, ge=0)
    """epochs in which each client fits its head to the body of the last round, before the evaluation"""


O = TypeVar("O", bound=Options)  # noqa: E741


class FedRepSplitClient(Client[O]):
    """Client with a personal head; its steps train the head, the body or both, and freeze the rest."""

    def start(self) -> None:
        if self.body(self.context.layout) == []:
            raise InputError(
                "fedrep and fedbabu share the body of a network, but a network with a single layer, such as logreg, "
                "has none; use a deeper one."
            )

    def head(self, layout: Layout) -> slice:
        """Return the columns of the head: the layer called `head`, or else the last one."""
        weights = [entry for entry in layout.entries if entry.kind is TensorKind.PARAMETER]
        named = [entry.layer for entry in weights if entry.layer.rpartition(".")[2] == "head"]
        unit = (named or [entry.layer for entry in weights])[-1]
        columns = [entry.columns for entry in weights if entry.layer == unit]
        return slice(columns[0].start, columns[-1].stop)

    def body(self, layout: Layout) -> list[slice]:
        """Return the columns of all other parameters."""
        head = self.head(layout)
        return [part for part in (slice(0, head.start), slice(head.stop, layout.trainable)) if part.start < part.stop]

    def personal_columns(self, layout: Layout) -> list[slice]:
        return [self.head(layout)]

    def head_steps(self, trainer: LocalTrainer, epochs: int) -> LocalSteps:
        """Return steps that train the head alone."""
        for module in trainer.module.modules():
            if isinstance(module, _NormBase):  # or the statistics of a frozen body would change
                module.eval()
        return self._make_steps(trainer, self.body(trainer.layout), epochs)

    def body_steps(self, trainer: LocalTrainer, epochs: int | None) -> LocalSteps:
        """Return steps that train the body alone; `epochs` None takes the run's own epochs or steps."""
        return self._make_steps(trainer, [self.head(trainer.layout)], epochs)

    def full_steps(self, trainer: LocalTrainer, epochs: int) -> LocalSteps:
        """Return steps that train head and body."""
        return self._make_steps(trainer, [], epochs)

    def _make_steps(self, trainer: LocalTrainer, frozen: list[slice], epochs: int | None) -> LocalSteps:
        trainer.scratch["frozen"] = [(part.start, part.stop) for part in frozen]
        trainer.scratch["as it was"] = [
            trainer.buffer(f"frozen {start}:{stop}", stop - start).copy_(trainer.weights[start:stop])
            for start, stop in trainer.scratch["frozen"]
        ]
        return LocalSteps(self.training_step, epochs)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().training_step(trainer, batch)
        for (start, stop), value in zip(trainer.scratch["frozen"], trainer.scratch["as it was"], strict=True):
            trainer.weights[start:stop].copy_(value)  # weight decay moves parameters without a gradient
        return loss

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        for start, stop in trainer.scratch["frozen"]:
            trainer.gradient[start:stop].zero_()  # so that it does not count in gradient clipping


@register(
    "fedrep",
    reference="Collins et al., ICML 2021",
    models_sent="2K - heads",
    extra_compute="11 epochs",
    new_client="A new client gets the global model, whose head is the mean of the trained clients'; after the last "
    "round it trains the head for fedrep.final_epochs epochs on its training samples.",
)
class FedRepClient(FedRepSplitClient[FedRepOptions]):
    """Share the body; each client fits its own head."""

    def notes(self) -> list[str]:
        if not self.context.config.keep_optimizer:
            return []
        return ["fedrep creates new optimizers for head and body in every round, so keep_optimizer has no effect."]

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.new_optimizer()
        yield self.head_steps(trainer, self.options.head_epochs)
        trainer.module.train()
        trainer.new_optimizer()
        yield self.body_steps(trainer, self.options.body_epochs)

    def personalize(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        if trainer.round >= self.context.rounds:
            trainer.new_optimizer()
            yield self.head_steps(trainer, self.options.final_epochs)
