"""Choose and create engines by name. Each one is imported when it is used."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from fedloom.config import Config
from fedloom.devices.selection import select_device, select_devices
from fedloom.engines.base import Engine
from fedloom.errors import InputError
from fedloom.training.context import TrainingContext

_LAUNCHERS = {"flower": "fedloom.flower.local_deployment:start_local_deployment"}
"""Engines with clients in other processes or on other machines, and the function that starts them.

Given as text, because these packages depend on `runs`, which depends on this module.
"""


def choose_engine(config: Config, device: torch.device) -> type[Engine]:
    """Return the engine class of a run on this machine. `device` is the first of its devices."""
    from fedloom.engines.sequential import SequentialEngine

    if config.engine == "sequential":
        if "," in config.device:
            raise InputError(f"the sequential engine computes on one device, not on {config.device!r}.")
        return SequentialEngine
    if device.type == "cuda":
        from fedloom.engines.cuda.engine import CudaEngine

        return CudaEngine
    from fedloom.engines.multiprocess.engine import MultiprocessEngine, multiprocess_engine_available

    if not multiprocess_engine_available():
        if config.engine == "multiprocess":
            raise InputError("the multiprocess engine needs a system that can fork processes; use --engine sequential.")
        return SequentialEngine
    return MultiprocessEngine


def create_engine(engine_class: type[Engine], context: TrainingContext, config: Config) -> Engine:
    """Create an engine with the workers, devices or slots of the config."""
    from fedloom.engines.sequential import SequentialEngine

    if engine_class is SequentialEngine:
        return SequentialEngine(context, select_device(config.device))
    from fedloom.engines.multiprocess.engine import MultiprocessEngine

    if engine_class is MultiprocessEngine:
        return MultiprocessEngine(context, config.workers)
    from fedloom.engines.cuda.engine import CudaEngine

    return CudaEngine(context, select_devices(config.device), config.slots)


def find_registered_launcher(engine: str) -> Callable[..., Any] | None:
    """Return the function that starts the clients of an engine, or None if they are on this machine."""
    if engine not in _LAUNCHERS:
        return None
    module, _, name = _LAUNCHERS[engine].partition(":")
    launcher: Callable[..., Any] = getattr(import_module(module), name)
    return launcher
