"""FedRep: one body for all, a head for each.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

The server sends the body. A client fits its own head to it for some epochs with the body frozen, then trains the body
for some epochs with the head frozen, and sends the body; the server averages bodies by samples. After the last round
every client fits its head once more.

What is frozen stays as it is to the last bit: its gradient is zero, weight decay and momentum do not move it, and while
the body is frozen its batch norms use the statistics they have and do not renew them. Each phase has a new optimiser.

Where the paper is silent: the head is the layer called `head`, or else the last one with parameters. A client that was
never asked starts with the initial head. The deployed model has the mean of the clients' heads, by samples; each client
is scored with its own, fitted once more after the last round as the authors do.
"""

from collections.abc import Iterator
from typing import TypeVar

from pydantic import Field
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedRepOptions(Options):
    head_epochs: int = Field(10, ge=0)
    """epochs in which a client fits its head, before it trains the body"""
    body_epochs: int = Field(1, ge=0)
    """epochs in which a client trains the body, with its head frozen; the run's own epochs are not used"""
    final_epochs: int = Field(10, ge=0)
    """epochs in which each client fits its head to the body of the last round, before it is scored"""


O = TypeVar("O", bound=Options)  # noqa: E741


class FedRepSplitClient(Client[O]):
    """A network cut in two: its head stays home, and steps move one part, or both, and leave the other alone."""

    def __init__(self, context: MethodContext, options: O) -> None:
        super().__init__(context, options)
        if self.body(context.layout) == []:
            raise InputError(
                "fedrep and fedbabu share a network's body, and one that is a single layer, as logreg is, has none; "
                "use a deeper one."
            )

    def head(self, layout: Layout) -> slice:
        """The columns of the head's parameters: of the layer called `head`, or else of the last one."""
        weights = [entry for entry in layout.entries if entry.kind is TensorKind.PARAMETER]
        named = [entry.unit for entry in weights if entry.unit.rpartition(".")[2] == "head"]
        unit = (named or [entry.unit for entry in weights])[-1]
        columns = [entry.columns for entry in weights if entry.unit == unit]
        return slice(columns[0].start, columns[-1].stop)

    def body(self, layout: Layout) -> list[slice]:
        """The columns of all other parameters."""
        head = self.head(layout)
        return [part for part in (slice(0, head.start), slice(head.stop, layout.trainable)) if part.start < part.stop]

    def stays_home(self, layout: Layout) -> list[slice]:
        return [self.head(layout)]

    def head_pass(self, bench: LocalTrainer, epochs: int) -> LocalSteps:
        """Train the head alone."""
        for module in bench.module.modules():
            if isinstance(module, _NormBase):  # or a frozen body's statistics would still move
                module.eval()
        return self._pass(bench, self.body(bench.layout), epochs)

    def body_pass(self, bench: LocalTrainer, epochs: int | None) -> LocalSteps:
        """Train the body alone; `epochs` None: the run's own epochs or steps."""
        return self._pass(bench, [self.head(bench.layout)], epochs)

    def whole_pass(self, bench: LocalTrainer, epochs: int) -> LocalSteps:
        """Train head and body."""
        return self._pass(bench, [], epochs)

    def _pass(self, bench: LocalTrainer, frozen: list[slice], epochs: int | None) -> LocalSteps:
        bench.scratch["frozen"] = [(part.start, part.stop) for part in frozen]
        bench.scratch["as it was"] = [
            bench.buffer(f"frozen {start}:{stop}", stop - start).copy_(bench.weights[start:stop])
            for start, stop in bench.scratch["frozen"]
        ]
        return LocalSteps(self.step, epochs)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().step(bench, batch)
        for (start, stop), value in zip(bench.scratch["frozen"], bench.scratch["as it was"], strict=True):
            bench.weights[start:stop].copy_(value)  # weight decay moves what has no gradient
        return loss

    def correct(self, bench: LocalTrainer) -> None:
        for start, stop in bench.scratch["frozen"]:
            bench.gradient[start:stop].zero_()  # and does not count where gradients are clipped


class FedRepClient(FedRepSplitClient[FedRepOptions]):
    """First the head, then the body."""

    def notes(self) -> list[str]:
        if not self.context.training.keep_optimizer:
            return []
        return ["fedrep makes a new optimiser for its heads and for its body in every round: keep_optimizer is no use."]

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.new_optimizer()
        yield self.head_pass(bench, self.options.head_epochs)
        bench.module.train()
        bench.new_optimizer()
        yield self.body_pass(bench, self.options.body_epochs)

    def personal(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        if bench.round >= self.context.rounds:
            bench.new_optimizer()
            yield self.head_pass(bench, self.options.final_epochs)


register(
    Method(
        name="fedrep",
        summary="share the body, and let each client fit a head of its own",
        reference="Collins et al., ICML 2021",
        options=FedRepOptions,
        local=FedRepClient,
        models_sent="2K - heads",
        client_keeps="its head",
        extra_compute="11 epochs",
    )
)
