"""FedGen: a generator of representations helps the clients train.

The server trains the generator with the heads of the client models.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021. A network f is a feature
extractor and a head h, its last linear layer. G makes a representation from noise and a label. Client k minimizes

    CE(f(x), y) + alpha CE(h(G(y')), y') + beta KL(h(G(y)) || f(x)),        y' uniform over classes

G is fixed and in evaluation mode, and h(G(y)) gets no gradient. The client returns its model and its label counts n_ky.
The server trains G with the heads h_k of the clients that returned an update, on

    sum_k mean_b a_ky CE(h_k(G(e, y)), y) + exp(-mean_ij d(e_i, e_j) d(G_i, G_j)),        a_ky = n_ky / sum_j n_jy

The second term is for diversity: d is the mean squared difference of noise and the mean absolute difference of
representations. y is drawn from labels that some client saw more than once. In the first round G is untrained, and
clients train as in FedAvg.

As in the authors' code noise is uniform in [0, 1), n_ky counts the samples of a client's training steps, and alpha,
beta and the generator's learning rate decay per round. Their optional term that sets G against the student has weight 0
and is left out. Defaults are those for MNIST; for EMNIST lr is 1e-4 and beta 1. FedMR's code uses alpha = beta = 0.2,
noise 100 and hidden 512 for CIFAR-10.
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
    """G: makes a representation from noise and a label."""

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
        """Return a new generator for the network of a run, with the same initial weights each time."""
        if not context.classes:
            raise InputError("fedgen needs data with classes, and these data have none.")
        _, head = find_classifier_head(context.make_model(), "fedgen")
        with context.rng_streams.seed_global_rng("fedgen"):
            generator = cls(noise, context.classes, hidden, head.in_features, context.layout.dtype)
        return generator.to(context.initial.device)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        given = torch.cat([noise, F.one_hot(y, self.classes).to(noise)], 1)
        made: Tensor = self.outer(self.norm(self.inner(given)).relu())
        return made

    def at(self, parameters: Tensor, statistics: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        """Return the output of a generator with these flat parameters and batch-norm statistics."""
        rows = {TensorKind.PARAMETER: parameters, TensorKind.BUFFER: statistics}
        made: Tensor = functional_call(self, {e.name: e.view(rows[e.kind]) for e in self._entries}, (noise, y))
        return made

    def lesson(
        self, row: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], label_counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the server's loss of the generator in `row` and its gradient; updates the statistics in `row`."""
        parameters = row[: self.layout.trainable].detach().requires_grad_()
        # `.data`: batch norm writes its statistics there, and autograd would see a change of the parameters.
        loss = fedgen_generator_loss(self.at(parameters, row.data, noise, y), noise, y, heads, label_counts)
        (gradient,) = torch.autograd.grad(loss, parameters)
        return loss.detach(), gradient


def fedgen_label_weights(label_counts: Tensor) -> Tensor:
    """Return a: the share of each client (row) in each class (column); 0 for a class without samples."""
    label_counts = label_counts.clamp(min=0)
    total = label_counts.sum(0)
    return label_counts / torch.where(total > 0, total, 1.0)


def fedgen_diversity_loss(noise: Tensor, representations: Tensor) -> Tensor:
    """Return the diversity term: small if representations differ with the noise, 1 if all are equal."""
    apart = (noise[:, None] - noise).square().mean(2) * (representations[:, None] - representations).abs().mean(2)
    return apart.mean().neg().exp()


def fedgen_generator_loss(
    representations: Tensor, noise: Tensor, y: Tensor, heads: Sequence[Mapping[str, Tensor]], label_counts: Tensor
) -> Tensor:
    """Return the server's loss of `representations` for labels `y`; `label_counts` has one row per head."""
    loss = fedgen_diversity_loss(noise, representations)
    for head, a in zip(heads, fedgen_label_weights(label_counts), strict=True):
        wrong = F.cross_entropy(F.linear(representations, head["weight"], head.get("bias")), y, reduction="none")
        loss = loss + (a[y] * wrong).mean()
    return loss


class FedGenOptions(Options):
    alpha: float = Field(10.0, ge=0)
    """weight of the head's loss on generated representations; 0 with beta 0 is FedAvg"""
    beta: float = Field(10.0, ge=0)
    """weight of the KL divergence between outputs for generated and own representations"""
    decay: float = Field(0.98, gt=0, le=1)
    """factor on alpha, beta and the generator's learning rate per round"""
    noise: int = Field(32, ge=1)
    """size of the noise vector"""
    hidden: int = Field(256, ge=1)
    """width of the generator's hidden layer"""
    steps: int = Field(50, ge=0)
    """training steps of the generator per round"""
    batch_size: int = Field(32, ge=2)
    """representations in a training step of the generator"""
    lr: float = Field(3e-4, ge=0)
    """learning rate of the generator (Adam)"""
    weight_decay: float = Field(1e-2, ge=0)
    """weight decay of the generator"""


class FedGenClient(Client[FedGenOptions]):
    """Client with two more terms in its loss."""

    def start(self) -> None:
        context, options = self.context, self.options
        self.generator = FedGenGenerator.fit(context, options.noise, options.hidden).eval()

    def upload_shapes(self, layout: Layout) -> Shapes:
        return {"labels": (self.context.classes,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        fade = self.options.decay**trainer.round
        trainer.scratch["taught"] = "generator" in trainer.extras and bool(self.options.alpha or self.options.beta)
        for name in ("alpha", "beta"):
            trainer.scratch[name] = trainer.buffer(f"fedgen {name}").fill_(fade * getattr(self.options, name))
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        trainer.uploads["labels"] += F.one_hot(batch.y, self.context.classes).sum(0)
        if not trainer.scratch["taught"]:
            return super().training_step(trainer, batch)
        output = trainer.module(batch.x)
        loss = self.context.criterion(output, batch.y)
        head, any_y = (
            find_classifier_head(trainer.module, "fedgen")[1],
            torch.randint_like(batch.y, self.context.classes),
        )
        taught = F.cross_entropy(head(self.generate(trainer, any_y)), any_y)
        with torch.no_grad():
            target = head(self.generate(trainer, batch.y)).softmax(1)
        distance = F.kl_div(output.log_softmax(1), target, reduction="batchmean")
        trainer.backward(loss + trainer.scratch["alpha"] * taught + trainer.scratch["beta"] * distance)
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss.detach()

    @torch.no_grad()
    def generate(self, trainer: LocalTrainer, y: Tensor) -> Tensor:
        row = trainer.extras["generator"]
        noise = torch.rand(len(y), self.options.noise, dtype=row.dtype, device=row.device)
        return self.generator.at(row, row, noise, y)


class FedGenExtras(Extras[FedGenOptions]):
    """The generator and its optimizer."""

    needs_reason = "learns a generator from each client's head and labels"

    def start(self) -> None:
        context, options = self.context, self.options
        self._generator = FedGenGenerator.fit(context, options.noise, options.hidden).train()
        layout, name = self._generator.layout, find_classifier_head(context.make_model(), "fedgen")[0]
        self._bank = context.server.make_bank(1, layout.floats)
        self.row = self._bank.rows[0]
        self.row.copy_(layout.read(self._generator, context.server.device)[: layout.floats])
        self.mean, self.square = (torch.zeros_like(self.row[: layout.trainable]) for _ in range(2))
        self.steps = 0
        self._head = {e.name.rpartition(".")[2]: e for e in context.layout.entries if e.layer == name}
        if "weight" not in self._head:
            raise InputError(f"fedgen learns from the clients' heads, but {name} of this network is not trained.")
        self._heads: list[dict[str, Tensor]] = []
        self._labels: list[Tensor] = []
        self._loss: Tensor | None = None

    def send_to_client(self, round: int, client_id: int) -> Mapping[str, Tensor]:
        return {"generator": self.row} if self.steps else {}

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        self._heads.append({leaf: entry.view(update.row).clone() for leaf, entry in self._head.items()})
        self._labels.append(update.extras["labels"].clone())

    def end_round(self, round: int) -> None:
        heads, labels = self._heads, self._labels
        self._heads, self._labels, self._loss = [], [], None
        counts = torch.stack(labels) if labels else self.row.new_zeros(1, self.context.classes)
        owned = (counts > 1).any(0).nonzero().flatten()
        if not len(owned):
            return
        o, device, weights = self.options, self.row.device, self.row[: len(self.mean)]
        optimizer = Adam(weight_decay=o.weight_decay)
        optimizer.mean, optimizer.square, optimizer.steps = self.mean, self.square, self.steps
        draw = self.context.rng_streams.pytorch("fedgen generator", round, device=device)
        for _ in range(o.steps):
            y = owned[torch.randint(len(owned), (o.batch_size,), generator=draw, device=device)]
            noise = torch.rand(o.batch_size, o.noise, generator=draw, dtype=self.row.dtype, device=device)
            self._loss, gradient = self._generator.lesson(self.row, noise, y, heads, counts)
            optimizer.step(weights, gradient, o.lr * o.decay**round)
        self.steps += o.steps

    def diagnostics(self) -> dict[str, float]:
        return {} if self._loss is None else {"generator loss": float(self._loss)}


register(
    Method(
        name="fedgen",
        summary="Train a generator of representations with the client heads, and clients with its output",
        reference="Zhu et al., ICML 2021",
        options=FedGenOptions,
        client=FedGenClient,
        extras=FedGenExtras,
        neutral={"alpha": 0.0, "beta": 0.0},
        models_sent="2K + generators",
        server_state="model, G",
        extra_compute="server learns",
    )
)
