"""DiWA: each client averages diverse models, each from its best epoch.

Models are added only if they help on validation samples.

Ramé et al., "Diverse Weight Averaging for Out-of-Distribution Generalization", NeurIPS 2022. The error of a mean of
weights falls with the diversity of the models, as long as they lie in one valley of the loss. So a client trains
several models from one start with hyperparameters drawn from mild ranges, and keeps the best epoch of each.

- uniform: average all models.
- restricted (`greedy`): sort by validation accuracy, start with the best, add each other one if the mean gets no worse.

It is a model soup (soups.py) with other defaults. The paper on Local Superior Soups uses the name DiWA for the greedy
version, hence the default. The paper's learning rates {1e-5, 3e-5, 5e-5} become factors on the configured one. Batch
sizes stay. The authors may train the classifier alone first; here all models start from the received one, with its
classifier.
"""

from typing import Literal

from pydantic import Field

from fedloom.methods.registry import register
from fedloom.methods.soups import Decay, Factor, Rate, SoupsClient, SoupsOptions


class DiwaOptions(SoupsOptions):
    selection: Literal["uniform", "greedy"] = "greedy"
    """which models are averaged: all, or (restricted) those that do not lower the validation accuracy of the mean"""
    keep: Literal["last", "best"] = "best"
    """which weights of a model count: the last ones, or those of the epoch with the best validation accuracy"""
    lr_factors: list[Factor] = Field([1.0, 0.6, 0.2])
    """factors on the learning rate; each model but the first draws one; [] keeps the rate"""
    batch_factors: list[Factor] = Field([])
    """factors on the batch size, likewise"""
    weight_decays: list[Decay] = Field([1e-4, 1e-6])
    """weight decays, likewise"""
    dropouts: list[Rate] = Field([0.0, 0.1, 0.5])
    """rates of the dropout layers that the network has, likewise"""


@register(
    "diwa", reference="Ramé et al., NeurIPS 2022", neutral={"models": 1, "keep": "last"}, extra_compute="client 4x"
)
class DiwaClient(SoupsClient[DiwaOptions]):
    """Each client trains several diverse models and averages those that help on its validation samples."""

    name = "diwa"
