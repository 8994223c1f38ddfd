"""Model soups: each client trains several models with different hyper-parameters and returns their mean.

Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time", ICML 2022. Every run starts at the model the client received.

- uniform soup: the mean of all runs;
- greedy soup (recipe 1): sort the runs by validation accuracy; begin with the best, and add each of the others if the
  accuracy of the mean does not fall. The authors' code asks for it to rise (`strict`).

The first run has the run's own settings, so that one model is FedAvg; each of the others draws a learning rate, a
batch size, a weight decay and a dropout rate. The values are those of the paper on Local Superior Soups, which trains
Adam at 5e-4 with batches of 64: its learning rates and batch sizes are here factors on the run's own. Dropout changes
layers that the network has, and adds none. The runs of a client also see their batches in different orders. Where the
run says `keep_optimizer` it is the first of them that goes on with what a client's first one knew. That paper
trains 32 models of 8 epochs each; here it is 4, which it gives SWA and its own method. A loss that knows no classes is
judged instead of the accuracy. Batch norm's statistics of a mean are found by one more pass over the client's samples
(`estimate`), also of those means that the greedy soup tries: what is judged is what is returned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedloom.config import TrainingConfig
from fedloom.core.averaging import WeightedMean, average_models
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.swa import swa_statistics_notes
from fedloom.training.trainer import LocalSteps, LocalTrainer

Factor = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class SoupsOptions(Options):
    models: int = Field(4, ge=1)
    """how many models a client trains, the first of them with the run's own settings"""
    epochs: int | None = Field(None, ge=0)
    """epochs of each; by default the run's own, so that a client computes `models` times as much"""
    selection: Literal["uniform", "greedy"] = "uniform"
    """which of them are averaged: all, or those that do not lower the validation accuracy of the mean"""
    strict: bool = False
    """greedy only: a model must raise the accuracy to be taken, not merely keep it"""
    keep: Literal["last", "best"] = "last"
    """what a model's training gives: its last weights, or those of the epoch with the best validation accuracy"""
    lr_factors: list[Factor] = Field([1.0, 0.2, 0.02])
    """factors on the learning rate, of which each model but the first draws one; [] leaves it alone"""
    batch_factors: list[Factor] = Field([0.5, 1.0, 2.0])
    """factors on the batch size, likewise"""
    weight_decays: list[Decay] = Field([5e-4, 5e-5, 5e-6])
    """weight decays, likewise"""
    dropouts: list[Rate] = Field([0.0, 0.1, 0.3])
    """rates of the dropout layers that the network has, likewise"""
    validation: float = Field(0.2, ge=0, lt=1)
    """share of each client's samples held out where models are chosen by it, unless --validation is given"""
    estimate: bool = True
    """estimate batch norm's statistics of the mean anew from the client's samples; otherwise they are averaged"""


O = TypeVar("O", bound=SoupsOptions)  # noqa: E741 - as in base.py


@dataclass(frozen=True)
class _SoupRecipe:
    """The hyper-parameters of one run."""

    training: TrainingConfig
    dropout: float | None = None
    """None: as the network has it."""


def _dropout_layers(module: nn.Module) -> list[_DropoutNd]:
    """The layers whose rate a recipe changes."""
    return [layer for layer in module.modules() if isinstance(layer, _DropoutNd)]


class SoupsClient(Client[O]):
    """Several trainings from the received model, and the mean of what came out."""

    name = "soups"

    def __init__(self, context: MethodContext, options: O) -> None:
        super().__init__(context, options)
        # The network's own rates, because a bench whose client failed in the middle may still have others.
        self.rates = [layer.p for layer in _dropout_layers(context.make_module())] if options.dropouts else []

    def notes(self) -> list[str]:
        return (
            swa_statistics_notes(self.context, self.name) if self.options.estimate and self.options.models > 1 else []
        )

    def holds_out(self) -> float:
        options = self.options
        chooses = options.keep == "best" or (options.selection == "greedy" and options.models > 1)
        return options.validation if chooses else 0.0

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        options, own, received = self.options, bench.training, bench.row.clone()
        uniform, ingredients = WeightedMean(bench.layout), list[Tensor]()
        for number, recipe in enumerate(self.recipes(bench)):
            bench.row.copy_(received)
            self.follow(bench, recipe)
            if not number:
                bench.recall_optimizer()
            yield from self.one_run(bench)
            if not number:
                bench.keep_optimizer()
            if options.selection == "uniform":
                uniform.add(bench.row)
            else:
                ingredients.append(bench.row.clone())
        self.follow(bench, _SoupRecipe(own))
        bench.recall_optimizer()  # of what the first run knew, for that is kept
        if options.selection == "greedy":
            bench.row.copy_(greedy_soup(bench, ingredients, options.strict, options.estimate))
            return
        uniform.into(bench.row)
        if options.estimate and options.models > 1:  # one model has its own already
            bench.estimate_statistics()

    def follow(self, bench: LocalTrainer, recipe: _SoupRecipe) -> None:
        """Train from here on by this recipe."""
        bench.adopt(recipe.training)
        if self.rates:
            for layer, own in zip(_dropout_layers(bench.module), self.rates, strict=True):
                layer.p = own if recipe.dropout is None else recipe.dropout
        # A recorded step must not be replayed with another recipe's rate: here an engine sees it.
        bench.scratch["dropout"] = -1.0 if recipe.dropout is None else recipe.dropout

    def recipes(self, bench: LocalTrainer) -> Iterator[_SoupRecipe]:
        """The run's own settings, and then draws from the ranges."""
        options, own = self.options, bench.training
        draw = self.context.streams.numpy("soup", bench.round, bench.client)
        yield _SoupRecipe(own)
        for _ in range(options.models - 1):
            lr = own.lr * _one_of(options.lr_factors, 1.0, draw)
            size = own.batch_size * _one_of(options.batch_factors, 1.0, draw)
            decay = _one_of(options.weight_decays, own.weight_decay, draw)
            dropout = _one_of(options.dropouts, -1.0, draw)
            changes = {"lr": lr, "batch_size": max(1, round(size)) if own.batch_size else 0, "weight_decay": decay}
            yield _SoupRecipe(own.model_copy(update=changes), dropout if dropout >= 0 else None)

    def one_run(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        """One training; the bench's row is what it gives."""
        whole = LocalSteps(self.step, epochs=self.options.epochs)
        if self.options.keep == "last":
            yield whole
            return
        left, epoch = bench.length(whole), bench.length(LocalSteps(self.step, epochs=1))
        best, best_merit = bench.row.clone(), -inf
        while left > 0:
            yield LocalSteps(self.step, steps=min(left, epoch))
            left -= epoch
            now = _validation_merit(bench, bench.row)
            if now >= best_merit:  # of equal ones the later, which has learned longer
                best_merit = now
                best.copy_(bench.row)
        bench.row.copy_(best)


def _validation_merit(bench: LocalTrainer, row: Tensor) -> float:
    """How good a model is on the validation samples: its accuracy, or minus its loss where there are no classes."""
    score = bench.validate(row)
    if not isfinite(score.loss):
        return -inf  # a model that is not finite has an accuracy too
    return -score.loss if score.accuracy is None else score.accuracy


def greedy_soup(bench: LocalTrainer, ingredients: list[Tensor], strict: bool = False, estimate: bool = False) -> Tensor:
    """Recipe 1: the best model, and of the others in order those that do not make the mean worse.

    With `estimate` a mean gets statistics of its own before it is judged, in the bench's row.
    """
    merits = [_validation_merit(bench, row) for row in ingredients]
    ranked = [ingredients[i] for i in sorted(range(len(merits)), key=lambda i: -merits[i])]
    chosen, best, soup = ranked[:1], max(merits), ranked[0]
    for row in ranked[1:]:
        trial = average_models(bench.layout, [*chosen, row])
        if estimate:
            bench.row.copy_(trial)
            bench.estimate_statistics()
            trial.copy_(bench.row)
        now = _validation_merit(bench, trial)
        if now > best or (now == best and not strict):
            chosen, best, soup = [*chosen, row], now, trial
    return soup


def _one_of(values: list[float], otherwise: float, draw: np.random.Generator) -> float:
    """One of the values; the draw is made even where there is none, so that ranges do not depend on each other."""
    at = draw.random()
    return values[int(at * len(values))] if values else otherwise


register(
    Method(
        name="soups",
        summary="each client trains several models with different hyper-parameters and returns their mean",
        reference="Wortsman et al., ICML 2022",
        options=SoupsOptions,
        local=SoupsClient,
        neutral={"models": 1},
        models_sent="2K",
        extra_compute="client 4x",
    )
)
