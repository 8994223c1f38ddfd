"""DiWA: a soup of deliberately diverse models, each at its best, of which those that help are averaged.

Ramé et al., "Diverse Weight Averaging for Out-of-Distribution Generalization", NeurIPS 2022. The error of a mean of
weights falls with the diversity of the models, as long as they lie in one valley; so train from one start with
hyper-parameters drawn from mild ranges, and take of each run the epoch with the best validation accuracy.

- uniform: the mean of all runs;
- restricted: sort by validation accuracy, begin with the best, add each of the others if the mean is not worse.

All of this is a soup (soups.py) with other values. The paper on Local Superior Soups calls DiWA the version of model
soups that selects greedily, hence the default here. The learning rates {1e-5, 3e-5, 5e-5} are factors on the run's own.
Batch sizes stay as they are. The authors may train the classifier alone before all runs; here the runs start at the
model a client received, classifier and all.
"""

from typing import Literal

from pydantic import Field

from fedloom.methods.registry import Method, register
from fedloom.methods.soups import Decay, Factor, Rate, SoupsClient, SoupsOptions


class DiwaOptions(SoupsOptions):
    selection: Literal["uniform", "greedy"] = "greedy"
    """which models are averaged: all, or (restricted) those that do not lower the validation accuracy of the mean"""
    keep: Literal["last", "best"] = "best"
    """what a model's training gives: its last weights, or those of the epoch with the best validation accuracy"""
    lr_factors: list[Factor] = Field([1.0, 0.6, 0.2])
    """factors on the learning rate, of which each model but the first draws one; [] leaves it alone"""
    batch_factors: list[Factor] = Field([])
    """factors on the batch size, likewise"""
    weight_decays: list[Decay] = Field([1e-4, 1e-6])
    """weight decays, likewise"""
    dropouts: list[Rate] = Field([0.0, 0.1, 0.5])
    """rates of the dropout layers that the network has, likewise"""


class DiwaClient(SoupsClient[DiwaOptions]):
    """A soup."""

    name = "diwa"


register(
    Method(
        name="diwa",
        summary="each client averages those of several diverse models that help on its validation samples",
        reference="Ramé et al., NeurIPS 2022",
        options=DiwaOptions,
        local=DiwaClient,
        neutral={"models": 1, "keep": "last"},
        models_sent="2K",
        extra_compute="client 4x",
    )
)
