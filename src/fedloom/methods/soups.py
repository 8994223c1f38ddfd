"""Model soups: each client averages models with different hyperparameters.

Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time", ICML 2022. Every model starts from the one the client received.

- uniform soup: the mean of all models;
- greedy soup (recipe 1): sort the models by validation accuracy; start with the best, and add each other one if the
  accuracy of the mean does not fall. The authors' code requires it to rise (`strict`).

The first model uses the run's own settings, so a single model is FedAvg. Each other one draws a learning rate, a batch
size, a weight decay and a dropout rate. The values are those of the paper on Local Superior Soups, which trains with
Adam at 5e-4 and batches of 64; its learning rates and batch sizes are factors on the run's own here. Dropout changes
existing layers and adds none. The models of a client also see their batches in different orders. With
`keep_optimizer`, the first model continues with the optimizer state of the client's first one. That paper trains 32
models of 8 epochs each; the default here is 4, as it gives SWA and its own method. A loss without classes is compared
instead of the accuracy. One more pass over the client's samples estimates the batch-norm statistics of a mean
(`estimate`), also of the means that the greedy soup tries, so the evaluated model is the returned one.
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
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.methods.swa import swa_statistics_notes
from fedloom.training.trainer import LocalSteps, LocalTrainer

Factor = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class SoupsOptions(Options):
    models: int = Field(4, ge=1)
    """number of models that a client trains, the first of them with the run's own settings"""
    epochs: int | None = Field(None, ge=0)
    """epochs of each; those of the run by default, so a client computes `models` times as much"""
    selection: Literal["uniform", "greedy"] = "uniform"
    """which models are averaged: all, or those that do not lower the validation accuracy of the mean"""
    strict: bool = False
    """greedy only: add a model only if it raises the accuracy"""
    keep: Literal["last", "best"] = "last"
    """which weights of a model count: the last ones, or those of the epoch with the best validation accuracy"""
    lr_factors: list[Factor] = Field([1.0, 0.2, 0.02])
    """factors on the learning rate; each model but the first draws one; [] keeps the rate"""
    batch_factors: list[Factor] = Field([0.5, 1.0, 2.0])
    """factors on the batch size, likewise"""
    weight_decays: list[Decay] = Field([5e-4, 5e-5, 5e-6])
    """weight decays, likewise"""
    dropouts: list[Rate] = Field([0.0, 0.1, 0.3])
    """rates of the dropout layers that the network has, likewise"""
    validation: float = Field(0.2, ge=0, lt=1)
    """share of each client's samples held out if models are selected with them, unless --validation is given"""
    estimate: bool = True
    """estimate the batch-norm statistics of the mean from the client's samples; otherwise they are averaged"""


O = TypeVar("O", bound=SoupsOptions)  # noqa: E741 - as in base.py


@dataclass(frozen=True)
class _SoupRecipe:
    """The hyperparameters of one model."""

    config: TrainingConfig
    dropout: float | None = None
    """None: the network's own rates."""


def _dropout_layers(module: nn.Module) -> list[_DropoutNd]:
    """Return the layers whose rate a recipe changes."""
    return [layer for layer in module.modules() if isinstance(layer, _DropoutNd)]


@register("soups", reference="Wortsman et al., ICML 2022", neutral={"models": 1}, extra_compute="client 4x")
class SoupsClient(Client[O]):
    """Each client trains several models with different hyperparameters and returns their mean."""

    name = "soups"

    def start(self) -> None:
        # The network's own rates: if a client failed midway, the trainer may still have those of a recipe.
        self.rates = [layer.p for layer in _dropout_layers(self.context.make_model())] if self.options.dropouts else []

    def notes(self) -> list[str]:
        return (
            swa_statistics_notes(self.context, self.name) if self.options.estimate and self.options.models > 1 else []
        )

    def validation_fraction(self) -> float:
        options = self.options
        chooses = options.keep == "best" or (options.selection == "greedy" and options.models > 1)
        return options.validation if chooses else 0.0

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        options, config, received = self.options, trainer.config, trainer.row.clone()
        uniform, ingredients = WeightedMean(trainer.layout), list[Tensor]()
        for number, recipe in enumerate(self.recipes(trainer)):
            trainer.row.copy_(received)
            self.follow(trainer, recipe)
            if not number:
                trainer.load_optimizer_state()
            yield from self.one_run(trainer)
            if not number:
                trainer.save_optimizer_state()
            if options.selection == "uniform":
                uniform.add(trainer.row)
            else:
                ingredients.append(trainer.row.clone())
        self.follow(trainer, _SoupRecipe(config))
        trainer.load_optimizer_state()  # that of the first model, which is the one to keep
        if options.selection == "greedy":
            trainer.row.copy_(greedy_soup(trainer, ingredients, options.strict, options.estimate))
            return
        uniform.write_to(trainer.row)
        if options.estimate and options.models > 1:  # a single model has its own already
            trainer.update_batch_norm_statistics()

    def follow(self, trainer: LocalTrainer, recipe: _SoupRecipe) -> None:
        """Use this recipe for the following training steps."""
        trainer.use_config(recipe.config)
        if self.rates:
            for layer, own in zip(_dropout_layers(trainer.module), self.rates, strict=True):
                layer.p = own if recipe.dropout is None else recipe.dropout
        # Lets an engine see the rate, so that it replays no step captured with another recipe.
        trainer.scratch["dropout"] = -1.0 if recipe.dropout is None else recipe.dropout

    def recipes(self, trainer: LocalTrainer) -> Iterator[_SoupRecipe]:
        """Yield the run's own settings, then draws from the ranges."""
        options, config = self.options, trainer.config
        draw = self.context.rng_streams.numpy("soup", trainer.round, trainer.client_id)
        yield _SoupRecipe(config)
        for _ in range(options.models - 1):
            lr = config.lr * _one_of(options.lr_factors, 1.0, draw)
            size = config.batch_size * _one_of(options.batch_factors, 1.0, draw)
            decay = _one_of(options.weight_decays, config.weight_decay, draw)
            dropout = _one_of(options.dropouts, -1.0, draw)
            changes = {"lr": lr, "batch_size": max(1, round(size)) if config.batch_size else 0, "weight_decay": decay}
            yield _SoupRecipe(config.model_copy(update=changes), dropout if dropout >= 0 else None)

    def one_run(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        """Train one model; the result is the trainer's row."""
        whole = LocalSteps(self.training_step, epochs=self.options.epochs)
        if self.options.keep == "last":
            yield whole
            return
        left, epoch = trainer.num_steps(whole), trainer.num_steps(LocalSteps(self.training_step, epochs=1))
        best, best_merit = trainer.row.clone(), -inf
        while left > 0:
            yield LocalSteps(self.training_step, steps=min(left, epoch))
            left -= epoch
            now = _validation_merit(trainer, trainer.row)
            if now >= best_merit:  # among equal ones the later, which has trained longer
                best_merit = now
                best.copy_(trainer.row)
        trainer.row.copy_(best)


def _validation_merit(trainer: LocalTrainer, row: Tensor) -> float:
    """Return the validation accuracy of a model, or minus its loss if there are no classes."""
    result = trainer.validate(row)
    if not isfinite(result.loss):
        return -inf  # a model that is not finite may still have an accuracy
    return -result.loss if result.accuracy is None else result.accuracy


def greedy_soup(
    trainer: LocalTrainer, ingredients: list[Tensor], strict: bool = False, estimate: bool = False
) -> Tensor:
    """Average the best model and, in order, the others that do not make the mean worse (recipe 1).

    With `estimate`, each mean gets its own batch-norm statistics before it is evaluated, in the trainer's row.
    """
    merits = [_validation_merit(trainer, row) for row in ingredients]
    ranked = [ingredients[i] for i in sorted(range(len(merits)), key=lambda i: -merits[i])]
    chosen, best, soup = ranked[:1], max(merits), ranked[0]
    for row in ranked[1:]:
        trial = average_models(trainer.layout, [*chosen, row])
        if estimate:
            trainer.row.copy_(trial)
            trainer.update_batch_norm_statistics()
            trial.copy_(trainer.row)
        now = _validation_merit(trainer, trial)
        if now > best or (now == best and not strict):
            chosen, best, soup = [*chosen, row], now, trial
    return soup


def _one_of(values: list[float], otherwise: float, draw: np.random.Generator) -> float:
    """Draw one of the values. An empty list draws too, so that the ranges do not depend on each other."""
    at = draw.random()
    return values[int(at * len(values))] if values else otherwise
