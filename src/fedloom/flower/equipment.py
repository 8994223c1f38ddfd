"""What the sites of one process have in common: the network, the method, a bench to train at.

A site of its own has a process of its own. In a simulation one process serves many sites, and making the same network
for each of them would take longer than the rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.bench import Bench
from fedloom.config import Config
from fedloom.engines.base import Shop
from fedloom.flower.data import Task
from fedloom.flower.tensors import Travel
from fedloom.ground import build_shop
from fedloom.request import Own


@dataclass(frozen=True)
class Equipment:
    """Everything but the data of one site, and what its clients keep."""

    config: Config
    shop: Shop
    initial: Tensor
    """The model that all start from."""
    travel: Travel
    bench: Bench


_last: dict[str, Equipment] = {}


def equip(config: Config, own: Callable[[], Own], task: Task | None = None) -> Equipment:
    """The equipment for this run; `own` brings data of this `task` where it has not been made before."""
    about = (task.classes, task.shape, task.tokens, task.prepare) if task is not None else ()
    key = config.model_dump_json() + repr(about)
    if key not in _last:
        _last.clear()
        complete, shop = build_shop(config, own())
        workshop = shop.workshop
        initial = workshop.layout.read(workshop.module)  # before the bench changes the module
        travel = Travel(workshop.layout, workshop.stays_home)
        _last[key] = Equipment(complete, shop, initial, travel, Bench(workshop, torch.device(complete.device)))
    return _last[key]
