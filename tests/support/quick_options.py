"""Options of methods for runs of a few rounds."""

from typing import Any

QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 10, "check_every": 5},
    "fedbe": {"epochs": 2},
    "fedlaw": {"epochs": 2},
    "fedcda": {"warmup": 1},
    "dynafed": {"L": 2, "s": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1, "refine_epochs": 1},
    "fedasam-swa": {"start": 0.0, "cycle": 1},
    "fedrep": {"head_epochs": 2, "final_epochs": 1},
    "fedgen": {"steps": 10},
}
"""Options that save time, or let a method do in three rounds what it does later."""
