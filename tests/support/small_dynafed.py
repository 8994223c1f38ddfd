"""DynaFed runs of a second: settings, a small CNN, and their results."""

from typing import Any

from torch import nn

from fedloom.methods._support.trajectory_matching import TrajectoryMatchingData
from fedloom.methods.dynafed import DynaFedRefiner
from fedloom.runs.build import BuiltRun

TINY: dict[str, Any] = {
    "L": 2,
    "s": 1,
    "iterations": 2,
    "inner_steps": 2,
    "images_per_class": 1,
    "inner_lr": 1.0,
    "refine_epochs": 2,
    "refine_lr": 0.01,
}


def tiny(**options: Any) -> dict[str, dict[str, Any]]:
    return {"dynafed": {**TINY, **options}}


def images(**options: Any) -> dict[str, Any]:
    """Settings of a quick run on images, with a network of convolutions."""
    made: dict[str, Any] = {"data": "digits", "model": convolutions, "clients": 6, "rounds": 4, "clients_per_round": 3}
    made |= {"epochs": 1, "report": False, "options": tiny(**options), "engine": "sequential"}
    return made


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )


def refiner_of(experiment: BuiltRun) -> DynaFedRefiner:
    refiner = experiment.rounds.parts.refiner
    assert isinstance(refiner, DynaFedRefiner)
    return refiner


def samples_of(refiner: DynaFedRefiner) -> TrajectoryMatchingData:
    assert refiner.images is not None
    assert refiner.logits is not None
    assert refiner.rate is not None
    return TrajectoryMatchingData(refiner.images, refiner.logits, refiner.rate)
