"""The command that repeats a comparison."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.config import config_to_command, make_config
from fedloom.report import EffectGrid


def comparison_to_command(
    methods: Sequence[str],
    grid: EffectGrid | None,
    seeds: int,
    target: float | None,
    options: Mapping[str, Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> str:
    """Return the command that repeats a comparison, with every setting that is not a default."""
    lists = [",".join(factor.levels) for factor in grid.factors] if grid else []
    words = ["fedloom", "compare", *(["--grid", " x ".join(lists)] if grid else methods), "--seeds", str(seeds)]
    if target is not None:
        words += ["--target", f"{target:g}"]
    config = make_config({**settings, "options": options or {}})
    return shlex.join([*words, *shlex.split(config_to_command(config))[3:]])  # after `fedloom run METHOD`
