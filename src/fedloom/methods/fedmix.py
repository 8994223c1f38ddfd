"""FedMix: clients mix their samples with means of other clients' samples, through a Taylor term.

Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021. Each client cuts its
samples into groups and shares the mean input x_ of each with the mean y_ of its one-hot labels; the server pools them
and sends them to all. A step on a batch (x, y) takes one (x_, y_) at random and, with z = (1 - lambda) x, descends

    (1 - lambda) CE(f(z), y) + lambda CE(f(z), y_) + lambda <dCE(f(z), y)/dz, x_>        averaged over the batch

the mixup of (x, y) with all samples behind (x_, y_), to first order. NaiveMix,
plain mixup with (x_, y_), is in naivemix.py.

Where the paper is silent: means are of inputs as the network gets them, normalised. The paper shares means before the
first round; here they come with a client's first update and the pool goes out with every model, so the first round is
FedAvg and the pool grows until all clients have been seen. Groups are counted (`groups`, 1 is a client's whole data),
not their size. Values of lambda in the paper: 0.05 for CIFAR-10, 0.1 for CIFAR-100, 0.2 for FEMNIST.
Means reveal something of the samples, the more the smaller the groups; real sites share none over fewer than ten. They
can be taken of numbers, not of tokens.

NaiveMix: clients mix their samples with means of other clients' samples.

Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021, the simpler of the
paper's two methods. Means (x_, y_) are shared and pooled as in fedmix.py; a step is plain mixup with one of them:

    (1 - lambda) CE(f(x'), y) + lambda CE(f(x'), y_),        x' = (1 - lambda) x + lambda x_
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, Extras, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.context import Criterion
from fedloom.training.trainer import LocalSteps, LocalTrainer

FEWEST = 10
"""Samples of a group whose mean a real site would share."""


class FedMixOptions(Options):
    lam: float = Field(0.05, ge=0, lt=1)
    """lambda, the share of the means in a mixture; 0 is FedAvg"""
    groups: int = Field(1, ge=1)
    """means that each client shares; 1 is the mean of all its samples"""


class FedMixClient(Client[FedMixOptions]):
    """One look at the samples for their means, and training on mixtures."""

    def __init__(self, context: MethodContext, options: FedMixOptions) -> None:
        super().__init__(context, options)
        if not context.classes:
            raise InputError("fedmix and naivemix mix labels, and these data have no classes.")
        if options.lam and context.takes_tokens():
            raise InputError(
                "fedmix and naivemix take means of inputs, and those of this network are tokens: no numbers."
            )

    def uploads(self, layout: Layout) -> Shapes:
        groups, context = self.options.groups, self.context
        return {"x": (groups, *context.shape), "y": (groups, context.classes), "count": (groups,)}

    def fewest_samples(self) -> int:
        return FEWEST * self.options.groups if self.options.lam else 1

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        if not self.options.lam:
            yield LocalSteps(self.step)
            return
        bench.scratch["taken"] = bench.buffer("fedmix taken").zero_()
        bench.scratch["samples"] = bench.buffer("fedmix samples").fill_(bench.samples)
        yield LocalSteps(self.observe, epochs=1)
        count = bench.uploads["count"].clamp(min=1)
        for mean in (bench.uploads["x"], bench.uploads["y"]):
            mean.div_(count.view(-1, *[1] * (mean.dim() - 1)))
        bench.restart()  # the same batches again, to be trained on
        bench.scratch["mixes"] = "x" in bench.extras
        yield LocalSteps(self.step)

    def observe(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        """Add the samples of a batch to the sums of their groups; no step."""
        if not batch.x.is_floating_point():
            raise InputError("fedmix and naivemix take means of inputs, and these are no numbers but tokens.")
        taken, groups = bench.scratch["taken"], self.options.groups
        at = taken + torch.arange(len(batch), device=bench.device)
        group = at.mul(groups).div(bench.scratch["samples"], rounding_mode="floor").long()
        one_hot = F.one_hot(batch.y, self.context.classes)
        for name, values in (("x", batch.x), ("y", one_hot), ("count", torch.ones_like(at))):
            sums = bench.uploads[name]
            # Not `index_add_`, which on a GPU adds in varying order.
            sums.index_put_((group,), values.to(sums), accumulate=True)
        taken.add_(len(batch))
        return torch.zeros_like(taken)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        if not self.options.lam or not bench.scratch["mixes"]:
            return super().step(bench, batch)
        x, y = bench.extras["x"], bench.extras["y"]
        one = torch.rand(1, device=bench.device).mul(len(x)).long()
        loss = self.mixed(bench, batch, x.index_select(0, one), y.index_select(0, one).expand(len(batch), -1))
        bench.backward(loss)
        self.correct(bench)
        bench.descend()
        return loss.detach()

    def mixed(self, bench: LocalTrainer, batch: Batch, x_: Tensor, y_: Tensor) -> Tensor:
        """The loss of a batch with one mean."""
        return fedmix_loss(bench.module, self.context.criterion, batch, x_, y_, self.options.lam)


def fedmix_loss(f: torch.nn.Module, criterion: Criterion, batch: Batch, x_: Tensor, y_: Tensor, lam: float) -> Tensor:
    """FedMix's loss. The gradient of the batch's mean loss, times x_ and summed, is the batch's mean already."""
    z = ((1 - lam) * batch.x).requires_grad_()
    output = f(z)
    own = criterion(output, batch.y)
    (slope,) = torch.autograd.grad(own, z, create_graph=True)
    return (1 - lam) * own + lam * criterion(output, y_) + lam * (slope * x_).sum()


class FedMixExtras(Extras[FedMixOptions]):
    """The pool of means, in the order in which clients were first seen."""

    kept = ("x", "y", "owners")

    def __init__(self, context: MethodContext, options: FedMixOptions) -> None:
        super().__init__(context, options)
        most = context.clients * options.groups
        width = context.initial.new_zeros(context.shape).numel()
        self._banks = context.make_bank(1, most * width), context.make_bank(1, most * context.classes)
        self.x = self._banks[0].rows[0].view(most, *context.shape)
        self.y = self._banks[1].rows[0].view(most, context.classes)
        self.owners: list[int] = []
        """The client behind each mean."""

    def send(self, round: int, client: int) -> Mapping[str, Tensor]:
        count = len(self.owners)
        return {"x": self.x[:count], "y": self.y[:count]} if count else {}

    def take(self, round: int, update: ClientUpdate) -> None:
        if update.client in self.owners:  # its samples are still the same
            return
        for group in range(self.options.groups):
            if update.extras["count"][group] > 0:  # with fewer samples than groups some have none
                self.x[len(self.owners)] = update.extras["x"][group]
                self.y[len(self.owners)] = update.extras["y"][group]
                self.owners.append(update.client)


register(
    Method(
        name="fedmix",
        summary="mix samples with means of others' samples, through a Taylor term",
        reference="Yoon et al., ICLR 2021",
        options=FedMixOptions,
        local=FedMixClient,
        companion=FedMixExtras,
        neutral={"lam": 0.0},
        models_sent="2K + means",
        needs_each="hands means of each client's samples to the others",
        server_keeps="model, means",
        extra_compute="client 2x",
    )
)


class NaiveMixClient(FedMixClient):
    """FedMix's clients with plain mixup."""

    def mixed(self, bench: LocalTrainer, batch: Batch, x_: Tensor, y_: Tensor) -> Tensor:
        lam, criterion = self.options.lam, self.context.criterion
        output = bench.module((1 - lam) * batch.x + lam * x_)
        return (1 - lam) * criterion(output, batch.y) + lam * criterion(output, y_)


register(
    Method(
        name="naivemix",
        summary="mix samples with means of others' samples",
        reference="Yoon et al., ICLR 2021",
        options=FedMixOptions,
        local=NaiveMixClient,
        companion=FedMixExtras,
        neutral={"lam": 0.0},
        models_sent="2K + means",
        needs_each="hands means of each client's samples to the others",
        server_keeps="model, means",
    )
)
