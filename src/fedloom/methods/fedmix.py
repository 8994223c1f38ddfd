"""FedMix and NaiveMix: mix samples with means of other clients' samples.

Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021. Each client cuts its
samples into groups and shares the mean input x_ of each group with the mean y_ of its one-hot labels. The server pools
the means and sends them to all clients. A step on a batch (x, y) draws one (x_, y_). NaiveMix is plain mixup with it:

    (1 - lambda) CE(f(x'), y) + lambda CE(f(x'), y_),        x' = (1 - lambda) x + lambda x_

FedMix approximates, to first order, the mixup of (x, y) with all samples behind (x_, y_). With z = (1 - lambda) x:

    (1 - lambda) CE(f(z), y) + lambda CE(f(z), y_) + lambda <dCE(f(z), y)/dz, x_>        averaged over the batch

Not specified in the paper: means are taken of network inputs, after normalization. The paper shares the means before
the first round. Here they arrive with a client's first update and the pool goes out with every model, so the first
round is FedAvg and the pool grows until all clients have taken part. `groups` is the number of groups, not their size;
1 is the mean of all samples of a client. Values of lambda in the paper: 0.05 for CIFAR-10, 0.1 for CIFAR-100, 0.2 for
FEMNIST. Means reveal something about the samples, more so in small groups; real sites share no mean of fewer than ten
samples. Tokens have no mean.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, Extras, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.context import Criterion
from fedloom.training.trainer import LocalSteps, LocalTrainer

FEWEST = 10
"""Fewest samples of a group whose mean a real site shares."""


class FedMixOptions(Options):
    lam: float = Field(0.05, ge=0, lt=1)
    """lambda, the share of the mean in a mixture; 0 is FedAvg"""
    groups: int = Field(1, ge=1)
    """number of means that each client shares; 1 is the mean of all its samples"""


class FedMixClient(Client[FedMixOptions]):
    """Client that computes the means of its samples, then trains on mixtures."""

    def start(self) -> None:
        context, options = self.context, self.options
        if not context.classes:
            raise InputError("fedmix and naivemix mix class labels, but these data have no classes.")
        if options.lam and context.takes_tokens():
            raise InputError("fedmix and naivemix average inputs, but the inputs of this network are tokens.")

    def upload_shapes(self, layout: Layout) -> Shapes:
        groups, context = self.options.groups, self.context
        return {"x": (groups, *context.shape), "y": (groups, context.classes), "count": (groups,)}

    def min_examples(self) -> int:
        return FEWEST * self.options.groups if self.options.lam else 1

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        if not self.options.lam:
            yield LocalSteps(self.training_step)
            return
        trainer.scratch["taken"] = trainer.buffer("fedmix taken").zero_()
        trainer.scratch["samples"] = trainer.buffer("fedmix samples").fill_(trainer.num_examples)
        yield LocalSteps(self.observe, epochs=1)
        count = trainer.uploads["count"].clamp(min=1)
        for mean in (trainer.uploads["x"], trainer.uploads["y"]):
            mean.div_(count.view(-1, *[1] * (mean.dim() - 1)))
        trainer.restart()  # trains on the same batches
        trainer.scratch["mixes"] = "x" in trainer.extras
        yield LocalSteps(self.training_step)

    def observe(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        """Add the samples of a batch to the sums of their groups, without a training step."""
        if not batch.x.is_floating_point():
            raise InputError("fedmix and naivemix average inputs, but these inputs are tokens.")
        taken, groups = trainer.scratch["taken"], self.options.groups
        at = taken + torch.arange(len(batch), device=trainer.device)
        group = at.mul(groups).div(trainer.scratch["samples"], rounding_mode="floor").long()
        one_hot = F.one_hot(batch.y, self.context.classes)
        for name, values in (("x", batch.x), ("y", one_hot), ("count", torch.ones_like(at))):
            sums = trainer.uploads[name]
            # On a GPU, `index_add_` adds in varying order.
            sums.index_put_((group,), values.to(sums), accumulate=True)
        taken.add_(len(batch))
        return torch.zeros_like(taken)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        if not self.options.lam or not trainer.scratch["mixes"]:
            return super().training_step(trainer, batch)
        x, y = trainer.extras["x"], trainer.extras["y"]
        one = torch.rand(1, device=trainer.device).mul(len(x)).long()
        loss = self.mixed(trainer, batch, x.index_select(0, one), y.index_select(0, one).expand(len(batch), -1))
        trainer.backward(loss)
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss.detach()

    def mixed(self, trainer: LocalTrainer, batch: Batch, x_: Tensor, y_: Tensor) -> Tensor:
        """Return the loss of a batch mixed with one mean."""
        return fedmix_loss(trainer.module, self.context.criterion, batch, x_, y_, self.options.lam)


def fedmix_loss(f: torch.nn.Module, criterion: Criterion, batch: Batch, x_: Tensor, y_: Tensor, lam: float) -> Tensor:
    """Return FedMix's loss; the gradient of a mean loss makes the Taylor term a mean over the batch too."""
    z = ((1 - lam) * batch.x).requires_grad_()
    output = f(z)
    own = criterion(output, batch.y)
    (slope,) = torch.autograd.grad(own, z, create_graph=True)
    return (1 - lam) * own + lam * criterion(output, y_) + lam * (slope * x_).sum()


class FedMixExtras(Extras[FedMixOptions]):
    """Pool of means, in the order in which the clients first took part."""

    needs_reason = "hands means of each client's samples to the others"

    def start(self) -> None:
        context, options = self.context, self.options
        most = context.num_clients * options.groups
        width = context.initial.new_zeros(context.shape).numel()
        self._banks = context.server.make_bank(1, most * width), context.server.make_bank(1, most * context.classes)
        self.x = self._banks[0].rows[0].view(most, *context.shape)
        self.y = self._banks[1].rows[0].view(most, context.classes)
        self.owners: list[int] = []
        """The client of each mean."""

    def send_to_client(self, round: int, client_id: int) -> Mapping[str, Tensor]:
        count = len(self.owners)
        return {"x": self.x[:count], "y": self.y[:count]} if count else {}

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        if update.client_id in self.owners:  # its samples have not changed
            return
        for group in range(self.options.groups):
            if update.extras["count"][group] > 0:  # some groups are empty if there are few samples
                self.x[len(self.owners)] = update.extras["x"][group]
                self.y[len(self.owners)] = update.extras["y"][group]
                self.owners.append(update.client_id)


register(
    Method(
        name="fedmix",
        summary="Mix samples with means of other clients' samples, by a Taylor approximation",
        reference="Yoon et al., ICLR 2021",
        options=FedMixOptions,
        client=FedMixClient,
        extras=FedMixExtras,
        neutral={"lam": 0.0},
        models_sent="2K + means",
        server_state="model, means",
        extra_compute="client 2x",
    )
)


class NaiveMixClient(FedMixClient):
    """Client that trains with plain mixup."""

    def mixed(self, trainer: LocalTrainer, batch: Batch, x_: Tensor, y_: Tensor) -> Tensor:
        lam, criterion = self.options.lam, self.context.criterion
        output = trainer.module((1 - lam) * batch.x + lam * x_)
        return (1 - lam) * criterion(output, batch.y) + lam * criterion(output, y_)


register(
    Method(
        name="naivemix",
        summary="Mix samples with means of other clients' samples",
        reference="Yoon et al., ICLR 2021",
        options=FedMixOptions,
        client=NaiveMixClient,
        extras=FedMixExtras,
        neutral={"lam": 0.0},
        models_sent="2K + means",
        server_state="model, means",
    )
)
