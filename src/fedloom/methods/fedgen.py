"""FedGen: a generator of representations, learned on the server from the clients' heads, teaches the clients.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021. A network f is a feature
extractor and a head h, its last linear layer. G makes a representation for a label out of noise. Client k minimises

    CE(f(x), y) + alpha CE(h(G(y')), y') + beta KL(h(G(y)) || f(x)),        y' uniform over classes

with G as it came, in the mode of a test, and no gradient through h(G(y)). It returns its model and its label counts
n_ky. The server trains G on the heads h_k of those that answered,

    sum_k mean_b a_ky CE(h_k(G(e, y)), y) + exp(-mean_ij d(e_i, e_j) d(G_i, G_j)),        a_ky = n_ky / sum_j n_jy

the second term for diversity (noise by mean squares, representations by mean absolute differences), y drawn from labels
that some client saw more than once. Before G has learned, in the first round, clients train as in FedAvg.

As in the authors' code noise is uniform in [0, 1), n_ky counts the samples of a client's training steps, and alpha,
beta and the generator's learning rate decay by the round. Their optional term that sets G against the student has
weight 0 and is left out. Values are those for MNIST; for EMNIST lr is 1e-4 and beta 1. FedMR's code has alpha = beta =
0.2 for CIFAR-10, noise 100, hidden 512.

FedGen's generator of representations, and what the server trains it with (see fedgen.py).
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.layout import Layout, TensorKind
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods._support.classifier_head import find_classifier_head
from fedloom.methods.base import Client, Extras, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.optimizers import Adam
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedGenGenerator(nn.Module):
    """G: noise and a label to a representation. Its models are rows like any other."""

    def __init__(self, noise: int, classes: int, hidden: int, latent: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.classes = classes
        self.inner = nn.Linear(noise + classes, hidden, dtype=dtype)
        self.norm = nn.BatchNorm1d(hidden, dtype=dtype)
        self.outer = nn.Linear(hidden, latent, dtype=dtype)
        self.layout = Layout.of(self)
        self._entries = [entry for entry in self.layout.entries if entry.kind is not TensorKind.INTEGER]

    @classmethod
    def fit(cls, context: MethodContext, noise: int, hidden: int) -> "FedGenGenerator":
        """A new generator for the network of a run, always the same."""
        if not context.classes:
            raise InputError("fedgen generates representations for classes, and these data have none.")
        _, head = find_classifier_head(context.make_module(), "fedgen")
        with context.streams.globally("fedgen"):
            generator = cls(noise, context.classes, hidden, head.in_features, context.layout.dtype)
        return generator.to(context.device)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        given = torch.cat([noise, F.one_hot(y, self.classes).to(noise)], 1)
        made: Tensor = self.outer(self.norm(self.inner(given)).relu())
        return made

    def at(self, parameters: Tensor, statistics: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        """What a generator makes whose parameters lie in one row and whose statistics of batch norm in another."""
        rows = {TensorKind.PARAMETER: parameters, TensorKind.BUFFER: statistics}
        made: Tensor = functional_call(self, {e.name: e.view(rows[e.kind]) for e in self._entries}, (noise, y))
        return made

    def lesson(
        self, row: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The server's loss of the generator in `row` and its gradient; the statistics in `row` take the batch in."""
        parameters = row[: self.layout.trainable].detach().requires_grad_()
        # `.data`: batch norm writes its statistics there, which autograd would take for a change of the parameters.
        loss = fedgen_generator_loss(self.at(parameters, row.data, noise, y), noise, y, heads, counts)
        (gradient,) = torch.autograd.grad(loss, parameters)
        return loss.detach(), gradient


def fedgen_label_weights(counts: Tensor) -> Tensor:
    """a: the share of each client (row) in each class (column); 0 for a class that nobody has."""
    counts = counts.clamp(min=0)
    total = counts.sum(0)
    return counts / torch.where(total > 0, total, 1.0)


def fedgen_diversity_loss(noise: Tensor, made: Tensor) -> Tensor:
    """Small where different noise makes different representations, 1 where all are the same."""
    apart = (noise[:, None] - noise).square().mean(2) * (made[:, None] - made).abs().mean(2)
    return apart.mean().neg().exp()


def fedgen_generator_loss(
    made: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], counts: Tensor
) -> Tensor:
    """The server's loss of representations `made` for labels `y`; `counts` are the labels of the clients of `heads`."""
    loss = fedgen_diversity_loss(noise, made)
    for head, a in zip(heads, fedgen_label_weights(counts), strict=True):
        wrong = F.cross_entropy(F.linear(made, head["weight"], head.get("bias")), y, reduction="none")
        loss = loss + (a[y] * wrong).mean()
    return loss


class FedGenOptions(Options):
    alpha: float = Field(10.0, ge=0)
    """weight of the head's loss on generated representations; 0 with beta 0 is FedAvg"""
    beta: float = Field(10.0, ge=0)
    """weight of the distance between outputs for generated and own representations"""
    decay: float = Field(0.98, gt=0, le=1)
    """factor on alpha, beta and the generator's learning rate after every round"""
    noise: int = Field(32, ge=1)
    """width of the noise that a representation is made of"""
    hidden: int = Field(256, ge=1)
    """width of the generator's hidden layer"""
    steps: int = Field(50, ge=0)
    """steps of the generator in a round"""
    batch_size: int = Field(32, ge=2)
    """representations in a step of the generator"""
    lr: float = Field(3e-4, ge=0)
    """learning rate of the generator (Adam)"""
    weight_decay: float = Field(1e-2, ge=0)
    """weight decay of the generator"""


class FedGenClient(Client[FedGenOptions]):
    """Training with two more terms in the loss."""

    def __init__(self, context: MethodContext, options: FedGenOptions) -> None:
        super().__init__(context, options)
        self.generator = FedGenGenerator.fit(context, options.noise, options.hidden).eval()

    def uploads(self, layout: Layout) -> Shapes:
        return {"labels": (self.context.classes,)}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        fade = self.options.decay**bench.round
        bench.scratch["taught"] = "generator" in bench.extras and bool(self.options.alpha or self.options.beta)
        for name in ("alpha", "beta"):
            bench.scratch[name] = bench.buffer(f"fedgen {name}").fill_(fade * getattr(self.options, name))
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        bench.uploads["labels"] += F.one_hot(batch.y, self.context.classes).sum(0)
        if not bench.scratch["taught"]:
            return super().step(bench, batch)
        output = bench.module(batch.x)
        loss = self.context.criterion(output, batch.y)
        head, any_y = find_classifier_head(bench.module, "fedgen")[1], torch.randint_like(batch.y, self.context.classes)
        taught = F.cross_entropy(head(self.generate(bench, any_y)), any_y)
        with torch.no_grad():
            target = head(self.generate(bench, batch.y)).softmax(1)
        distance = F.kl_div(output.log_softmax(1), target, reduction="batchmean")
        bench.backward(loss + bench.scratch["alpha"] * taught + bench.scratch["beta"] * distance)
        self.correct(bench)
        bench.descend()
        return loss.detach()

    @torch.no_grad()
    def generate(self, bench: LocalTrainer, y: Tensor) -> Tensor:
        row = bench.extras["generator"]
        noise = torch.rand(len(y), self.options.noise, dtype=row.dtype, device=row.device)
        return self.generator.at(row, row, noise, y)


class FedGenExtras(Extras[FedGenOptions]):
    """The generator and its optimiser."""

    kept = ("row", "mean", "square", "steps")

    def __init__(self, context: MethodContext, options: FedGenOptions) -> None:
        super().__init__(context, options)
        self.generator = FedGenGenerator.fit(context, options.noise, options.hidden).train()
        layout, name = self.generator.layout, find_classifier_head(context.make_module(), "fedgen")[0]
        self._bank = context.make_bank(1, layout.floats)
        self.row = self._bank.rows[0]
        self.row.copy_(layout.read(self.generator, context.device)[: layout.floats])
        self.mean, self.square = (torch.zeros_like(self.row[: layout.trainable]) for _ in range(2))
        self.steps = 0
        self._head = {e.name.rpartition(".")[2]: e for e in context.layout.entries if e.unit == name}
        if "weight" not in self._head:
            raise InputError(f"fedgen learns from the clients' heads, but {name} of this network is not trained.")
        self._heads: list[dict[str, Tensor]] = []
        self._labels: list[Tensor] = []
        self._loss: Tensor | None = None

    def send(self, round: int, client: int) -> Mapping[str, Tensor]:
        return {"generator": self.row} if self.steps else {}

    def take(self, round: int, update: ClientUpdate) -> None:
        self._heads.append({leaf: entry.view(update.row).clone() for leaf, entry in self._head.items()})
        self._labels.append(update.extras["labels"].clone())

    def finish(self, round: int) -> None:
        heads, labels = self._heads, self._labels
        self._heads, self._labels, self._loss = [], [], None
        counts = torch.stack(labels) if labels else self.row.new_zeros(1, self.context.classes)
        owned = (counts > 1).any(0).nonzero().flatten()
        if not len(owned):
            return
        o, device, weights = self.options, self.row.device, self.row[: len(self.mean)]
        optimizer = Adam(weight_decay=o.weight_decay)
        optimizer.mean, optimizer.square, optimizer.steps = self.mean, self.square, self.steps
        draw = self.context.streams.pytorch("fedgen generator", round, device=device)
        for _ in range(o.steps):
            y = owned[torch.randint(len(owned), (o.batch_size,), generator=draw, device=device)]
            noise = torch.rand(o.batch_size, o.noise, generator=draw, dtype=self.row.dtype, device=device)
            self._loss, gradient = self.generator.lesson(self.row, noise, y, heads, counts)
            optimizer.step(weights, gradient, o.lr * o.decay**round)
        self.steps += o.steps

    def diagnostics(self) -> dict[str, float]:
        return {} if self._loss is None else {"generator loss": float(self._loss)}


register(
    Method(
        name="fedgen",
        summary="a generator of representations, learned from the clients' heads, teaches the clients",
        reference="Zhu et al., ICML 2021",
        options=FedGenOptions,
        local=FedGenClient,
        companion=FedGenExtras,
        neutral={"alpha": 0.0, "beta": 0.0},
        models_sent="2K + generators",
        needs_each="learns a generator from each client's head and labels",
        server_keeps="model, G",
        extra_compute="server learns",
    )
)
