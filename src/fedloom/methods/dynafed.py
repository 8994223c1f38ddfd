"""DynaFed: synthesize data from early global models, fine-tune later ones on it.

Pi et al., "DynaFed: Tackling Client Data Heterogeneity with Global Dynamics", CVPR 2023. In the first L rounds the
server records the global models w^1 (the initial one), ..., w^L. Then it synthesizes, once, images X with soft labels y
(Algorithm 1): training on them moves a model along that trajectory. Each iteration draws a start w^t, takes s' steps on
(X, y), and changes X and y towards a target up to s models later (_support/trajectory_matching.py). In every later
round each new model is fine-tuned on (X, y) (Algorithm 2). Nothing leaves the server.

Not specified in the paper, taken from the authors' code: the distance is squared Euclidean, divided by that of the
start; N, s'; Adam and its rates for X, y and the inner learning rate (the paper has plain gradient descent with one
eta and gives no value: `optimizer=sgd`, `rate_lr=0`); differentiable augmentation in synthesis and fine-tuning; a new
Adam for each fine-tuning. Where paper and code differ, the paper is the default and the code is an option: L (25),
s (3), `target` (several), `refine_at_synthesis`. The code's clients keep Adam's moments between rounds; set
`keep_optimizer` for that.

Choices of fedloom: it refines any server. The trajectory is that of the global model, and every model that the next
round starts from is fine-tuned. A round without updates is not counted and fine-tunes nothing. Networks run in
evaluation mode, because synthetic images cannot replace the averaged batch-norm statistics. Inputs may be any real
numbers; only images are augmented.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedloom.core.layout import all_finite, model_digest
from fedloom.core.tasks import ClientUpdate
from fedloom.errors import FedloomError, InputError
from fedloom.methods._support.differentiable_augmentation import (
    DifferentiableAugmentation,
    parse_differentiable_augmentation,
)
from fedloom.methods._support.distillation import DistillationModel
from fedloom.methods._support.trajectory_matching import (
    Distance,
    GraphedTrajectoryMatcher,
    TrajectoryMatchingData,
    TrajectoryStep,
    match_trajectory,
    trajectory_soft_label_loss,
)
from fedloom.methods.base import MethodContext, Options, Refiner, Server
from fedloom.methods.registry import register
from fedloom.training.optimizers import SGD, Adam, StatefulOptimizer

LOOK_EVERY = 100
"""Iterations between two checks for non-finite samples. A check makes a GPU wait."""


class DynaFedOptions(Options):
    L: int = Field(20, ge=2)
    """rounds before the synthesis, and models in the trajectory"""
    s: int = Field(5, ge=1)
    """how many models after the start a target may lie"""
    initial: bool = True
    """start the trajectory with the initial model; otherwise with the model of the first round"""
    refine_at_synthesis: bool = False
    """fine-tune in the round of the synthesis too (the authors' code), and not only in later ones"""
    target: Literal["two", "several", "last"] = "two"
    """what to match: the mean of two of the next s models, of two to s of them (the code), or the last of them"""
    distance: Distance = "squared"
    """distance of models, divided by that of the start: squared Euclidean, or cosine"""
    inner_steps: int = Field(20, ge=0)
    """steps on the synthetic samples in one iteration (s' in the paper)"""
    inner_batch: int = Field(0, ge=0)
    """synthetic samples in one of these steps; 0 takes all"""
    inner_lr: float = Field(0.04, ge=0)
    """learning rate of these steps, at first"""
    iterations: int = Field(3000, ge=0)
    """iterations of the synthesis (N in the paper)"""
    images_per_class: int = Field(15, ge=1)
    """synthetic samples, as a multiple of the number of classes"""
    label_init: float = Field(0.0)
    """initial logit of a sample's own class; the others are 0, so 0 makes all classes equally likely"""
    optimizer: Literal["adam", "sgd"] = "adam"
    """optimizer of images, labels and inner learning rate: adam, or sgd (the paper's plain descent)"""
    image_lr: float = Field(0.05, ge=0)
    """learning rate of the images"""
    label_lr: float = Field(0.01, ge=0)
    """learning rate of the labels"""
    rate_lr: float = Field(1e-5, ge=0)
    """learning rate of the inner learning rate; 0 keeps it fixed (the paper)"""
    augment: str = "dsa"
    """augmentation of synthetic images: none, dsa (all), or some of color, crop, cutout, flip, scale, rotate with +"""
    checkpoint: bool = True
    """recompute the inner steps instead of keeping all of them in memory"""
    refine_epochs: int = Field(20, ge=0)
    """epochs of the fine-tuning on the synthetic samples; 0 is FedAvg"""
    refine_lr: float = Field(1e-4, ge=0)
    """learning rate of the fine-tuning"""
    refine_batch: int = Field(256, ge=0)
    """synthetic samples in a batch of the fine-tuning; 0 takes all"""
    refine_optimizer: Literal["adam", "sgd"] = "adam"
    """optimizer of the fine-tuning, a new one for each model"""

    @field_validator("augment")
    @classmethod
    def _known(cls, value: str) -> str:
        parse_differentiable_augmentation(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> "DynaFedOptions":
        if self.s >= self.L:
            raise ValueError(f"s must be below L: of {self.L} models none has another {self.s} further on.")
        return self


class DynaFedSteps:
    """Steps on the synthetic samples, as synthesis and fine-tuning take them: network, batches and augmentation."""

    def __init__(self, context: MethodContext, options: DynaFedOptions) -> None:
        self.context, self.options = context, options
        self.num_samples = options.images_per_class * context.classes
        self.kinds = parse_differentiable_augmentation(options.augment) if len(context.shape) == 3 else ()
        self.noise = torch.Generator(context.server.device)
        self.network, self.outputs = self._try_network()

    def replays(self) -> bool:
        """Return whether steps replay CUDA graphs. Launched one by one, they would make the GPU wait."""
        return self.context.server.device.type == "cuda"

    def first_samples(self, outputs: int) -> TrajectoryMatchingData:
        """Return noise as inputs, with uniform labels (or nearly so, by `label_init`)."""
        context, options, dtype = self.context, self.options, self.context.layout.dtype
        draw = context.rng_streams.pytorch("dynafed images")
        images = torch.randn((self.num_samples, *context.shape), generator=draw, dtype=dtype)
        own = torch.arange(self.num_samples) % context.classes
        logits = options.label_init * F.one_hot(own, outputs).to(dtype)
        rate = torch.tensor(options.inner_lr, dtype=dtype)
        return TrajectoryMatchingData(*(tensor.to(context.server.device) for tensor in (images, logits, rate)))

    def batches(self, count: int, size: int, draw: np.random.Generator) -> list[Tensor]:
        """Return all positions below `count` once, in random order, in batches."""
        order = torch.from_numpy(draw.permutation(count)).to(self.context.server.device, non_blocking=True)
        return list(torch.split(order, size))

    def augmentation(self, count: int, draw: np.random.Generator) -> DifferentiableAugmentation | None:
        """Draw the augmentation of a step on `count` samples."""
        if not self.kinds:
            return None
        kind, context = self.kinds[int(draw.integers(len(self.kinds)))], self.context
        seed = int(draw.integers(2**63))
        return DifferentiableAugmentation(kind, seed, count, context.shape, context.layout.dtype, self.noise)

    def graphed(self, data: TrajectoryMatchingData) -> GraphedTrajectoryMatcher:
        """Return the same steps as CUDA graphs."""
        return GraphedTrajectoryMatcher(self.network, data, self.context.initial, self.noise)

    def _try_network(self) -> tuple[DistillationModel, int]:
        """Return the network as a function, and its number of outputs. Reject networks before the run starts."""
        context = self.context
        if context.classes < 2:
            raise InputError("dynafed synthesizes samples with soft labels, so it needs data with classes.")
        if context.takes_tokens():
            raise InputError(
                "dynafed synthesizes inputs by gradient descent. This network takes token ids (it has an embedding), "
                "and these have no gradient: text cannot be synthesized."
            )
        network = DistillationModel(context.make_model(), context.layout, context.server.device)
        row = context.initial
        try:
            x = torch.zeros((2, *context.shape), dtype=context.layout.dtype, device=context.server.device)
            with torch.no_grad():
                output = network(row[: network.trainable], x, row)
            if output.dim() != 2 or output.shape[1] < context.classes:
                raise ValueError(f"for two inputs its output has the shape {tuple(output.shape)}")
            first = self.first_samples(output.shape[1])
            two = TrajectoryMatchingData(first.images[:2], first.label_logits[:2], first.learning_rate)
            match_trajectory(network, two, [TrajectoryStep()], row, row[: network.trainable] + 1)
        except Exception as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise InputError(
                "dynafed cannot be used here: it needs a classifier of real-valued inputs with second derivatives, "
                f"which cannot be computed for this network ({reason})."
            ) from error
        return network, output.shape[1]


class DynaFedSynthesis:
    """Algorithm 1: synthesize samples on which training follows the trajectory."""

    def __init__(self, steps: DynaFedSteps) -> None:
        self.steps, self.context, self.options = steps, steps.context, steps.options

    def synthesize(self, trajectory: list[Tensor]) -> tuple[TrajectoryMatchingData, Tensor | None]:
        """Return the samples, and the matching loss of each iteration."""
        options, context = self.options, self.context
        # The mark names all that the samples depend on: options, seed and trajectory.
        models = [model_digest(row) for row in trajectory]
        mark = f"dynafed {options.model_dump_json()} seed {context.rng_streams.seed} {models}"
        data, optimizers, losses = self._begin(context.server.partial_results.load_partial(mark))
        rates = (options.image_lr, options.label_lr, options.rate_lr)

        def make_partial() -> dict[str, Any]:
            known = [o.state_dict(tensor) for o, tensor in zip(optimizers, data.tensors(), strict=True)]
            so_far = torch.stack(losses) if losses else data.learning_rate.new_empty(0)
            return {"samples": data.tensors(), "optimizers": known, "losses": so_far}

        sweep = self.steps.graphed(data) if self.steps.replays() and options.checkpoint else None
        for n in range(len(losses), options.iterations):
            context.server.progress("synthesis", n, options.iterations)
            context.server.partial_results.save_partial_if_due(mark, n, make_partial)
            t, target = self.segment(n, trajectory)
            steps, row, kind = self.inner_steps(n), trajectory[t], options.distance
            if sweep is not None:
                found = sweep.match(steps, row, target, kind)
            else:
                found = match_trajectory(self.steps.network, data, steps, row, target, kind, not options.checkpoint)
            for tensor, gradient, optimizer, lr in zip(
                data.tensors(), found.gradients.tensors(), optimizers, rates, strict=True
            ):
                optimizer.step(tensor, gradient, lr)
            losses.append(found.loss)
            if (n + 1 == options.iterations or (n + 1) % LOOK_EVERY == 0) and not all(map(all_finite, data.tensors())):
                raise FedloomError(
                    f"dynafed's synthesis diverged within {n + 1} iterations: its samples are not finite. Lower "
                    "dynafed.inner_lr, dynafed.image_lr or dynafed.label_lr."
                )
        if sweep is not None:
            sweep.close()
        context.server.progress("synthesis", options.iterations, options.iterations)
        return data, torch.stack(losses) if losses else None

    def _begin(
        self, partial: Mapping[str, Any] | None
    ) -> tuple[TrajectoryMatchingData, list[StatefulOptimizer], list[Tensor]]:
        """Return samples, their optimizers and the losses so far: new ones, or those of a partial result."""
        optimizers = [_optimizer(self.options.optimizer) for _ in range(3)]
        if partial is None:
            return self.steps.first_samples(self.steps.outputs), optimizers, []
        device = self.context.server.device
        for optimizer, state in zip(optimizers, partial["optimizers"], strict=True):
            optimizer.load_state_dict({name: tensor.to(device) for name, tensor in state.items()})
        data = TrajectoryMatchingData(*(tensor.to(device) for tensor in partial["samples"]))
        return data, optimizers, list(partial["losses"].to(device))

    def segment(self, n: int, trajectory: list[Tensor]) -> tuple[int, Tensor]:
        """Return where iteration `n` starts on the trajectory, and its target weights."""
        s = self.options.s
        draw = self.context.rng_streams.numpy("dynafed segment", n)
        t = int(draw.integers(len(trajectory) - s))
        if self.options.target == "last":
            ends = [t + s]
        else:
            count = 2 if self.options.target == "two" or s < 2 else int(draw.integers(2, s + 1))
            ends = [int(end) for end in draw.integers(t + 1, t + s + 1, count)]
        return t, torch.stack([trajectory[end][: self.steps.network.trainable] for end in ends]).mean(0)

    def inner_steps(self, n: int) -> list[TrajectoryStep]:
        """Return the s' steps of iteration `n`: each on all samples, or on batches in random order."""
        options, count = self.options, self.steps.num_samples
        draw = self.context.rng_streams.numpy("dynafed steps", n)
        size = min(options.inner_batch or count, count)
        batches: list[Tensor | None] = []
        while len(batches) < options.inner_steps:
            batches += [None] if size == count else self.steps.batches(count, size, draw)
        return [
            TrajectoryStep(index, self.steps.augmentation(size if index is None else len(index), draw))
            for index in batches[: options.inner_steps]
        ]


class DynaFedFineTuning:
    """Fine-tune models on the synthetic samples, in Algorithm 2."""

    def __init__(self, steps: DynaFedSteps) -> None:
        self.steps, self.context, self.options = steps, steps.context, steps.options
        self._graphed: GraphedTrajectoryMatcher | None = None

    def fine_tune(self, round: int, model_index: int, row: Tensor, data: TrajectoryMatchingData) -> None:
        """Fine-tune the model in `row`, in place."""
        options, network = self.options, self.steps.network
        count = len(data.images)
        size = min(options.refine_batch or count, count)
        draw = self.context.rng_streams.numpy("dynafed refine", round, model_index)
        steps = [
            TrajectoryStep(index, self.steps.augmentation(len(index), draw))
            for _ in range(options.refine_epochs)
            for index in self.steps.batches(count, size, draw)
        ]
        if self.steps.replays():
            if self._graphed is None:
                self._graphed = self.steps.graphed(data)
            self._graphed.train(row, steps, lambda: _optimizer(options.refine_optimizer), options.refine_lr)
        else:
            optimizer = _optimizer(options.refine_optimizer)
            for step in steps:
                x, y = step.take(data.images, data.label_logits)
                weights = row[: network.trainable].detach().requires_grad_()
                loss = trajectory_soft_label_loss(network(weights, x, row), y)
                (gradient,) = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    optimizer.step(weights, gradient, options.refine_lr)
        if not self.context.layout.is_finite(row):
            raise FedloomError(
                f"round {round + 1}: a model is not finite after dynafed's fine-tuning; lower dynafed.refine_lr."
            )


def _optimizer(name: str) -> StatefulOptimizer:
    return Adam() if name == "adam" else SGD()


@register(
    "dynafed",
    reference="Pi et al., CVPR 2023",
    neutral={"refine_epochs": 0},
    server_state="L+1 models",
    extra_compute="server learns",
)
class DynaFedRefiner(Refiner[DynaFedOptions]):
    """Synthesize data from the models of the first rounds and fine-tune later models on it.

    This is Algorithm 2.
    """

    needs = "mean"

    def start(self) -> None:
        self.seen = 0
        """Rounds with at least one update."""
        self.trajectory: list[Tensor] = [self.context.initial.clone()] if self.options.initial else []
        """The global models so far, as rows; empty after the synthesis."""
        self.images: Tensor | None = None
        self.logits: Tensor | None = None
        self.rate: Tensor | None = None
        self.losses: Tensor | None = None
        """The matching loss of each iteration."""
        self._answers = 0
        self._last: dict[str, float] = {}
        steps = DynaFedSteps(self.context, self.options)
        self._synthesis, self._fine_tuning = DynaFedSynthesis(steps), DynaFedFineTuning(steps)

    def notes(self) -> list[str]:
        first, rounds = self.options.L + (not self.options.refine_at_synthesis), self.context.rounds
        if rounds >= first:
            return []
        return [
            f"dynafed refines from round {first} on (dynafed.L is {self.options.L}), and this run has {rounds}: "
            "until then it changes nothing."
        ]

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        self._answers += 1

    def refine(self, round: int, server: Server[Any]) -> None:
        self._last = {}
        if not self._answers:
            return
        self._answers = 0
        self.seen += 1
        options, now = self.options, self.seen == self.options.L
        if self.seen < options.L or (now and not options.initial):
            self.trajectory.append(server.global_model().detach().clone())
        if now:
            self.synthesize()
        if self.seen > options.L or (now and options.refine_at_synthesis):
            for model_index, row in enumerate(server.models()):
                self.fine_tune(round, model_index, row)

    def synthesize(self) -> None:
        """Make the samples, and forget the trajectory."""
        data, self.losses = self._synthesis.synthesize(self.trajectory)
        self.images, self.logits, self.rate = data.tensors()
        self.trajectory = []
        if self.losses is not None:
            self._last["matching loss"] = float(self.losses[-max(1, len(self.losses) // 10) :].mean())
        self._last["inner rate"] = float(data.learning_rate)

    def fine_tune(self, round: int, model_index: int, row: Tensor) -> None:
        """Fine-tune the model in `row` on the synthetic samples, in place."""
        data = self._data()
        assert data is not None, "the synthesis comes before the fine-tuning"
        self._fine_tuning.fine_tune(round, model_index, row, data)

    def _data(self) -> TrajectoryMatchingData | None:
        if self.images is None or self.logits is None or self.rate is None:
            return None
        return TrajectoryMatchingData(self.images, self.logits, self.rate)

    def artifacts(self) -> dict[str, dict[str, Tensor]]:
        data = self._data()
        if data is None:
            return {}
        shown = {"images": data.images, "labels": F.softmax(data.label_logits, dim=1), "rate": data.learning_rate}
        return {"synthetic": shown if self.losses is None else {**shown, "losses": self.losses}}

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)
