"""Engines by name, imported when they are used: choose_engine, create_engine, find_launcher."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from fedloom.config import Config
from fedloom.devices.selection import select_device, select_devices
from fedloom.engines.base import Engine
from fedloom.errors import InputError
from fedloom.training.local_training import EngineContext

_LAUNCHERS = {"flower": "fedloom.flower.local_deployment:start_local_deployment"}
"""Engines whose clients are in other processes or on other machines, and the function that starts these.

Text, because these packages build on runs and so on this module.
"""


def choose_engine(config: Config, device: torch.device) -> type[Engine]:
    """Choose the engine of a run on this machine; `device` is the first of its devices."""
    from fedloom.engines.sequential import SequentialEngine

    if config.engine == "plain":
        if "," in config.device:
            raise InputError(f"the plain engine computes on one device, not on {config.device!r}.")
        return SequentialEngine
    if device.type == "cuda":
        from fedloom.engines.cuda.engine import CudaEngine

        return CudaEngine
    from fedloom.engines.multiprocess.engine import MultiprocessEngine, multiprocess_engine_available

    if not multiprocess_engine_available():
        if config.engine == "host":
            raise InputError("the host engine needs a system that can fork processes; use --engine plain.")
        return SequentialEngine
    return MultiprocessEngine


def create_engine(chosen: type[Engine], shop: EngineContext, config: Config) -> Engine:
    """Create the chosen engine with as many workers, devices or slots as the config says."""
    from fedloom.engines.sequential import SequentialEngine

    if chosen is SequentialEngine:
        return SequentialEngine(shop, select_device(config.device))
    from fedloom.engines.multiprocess.engine import MultiprocessEngine

    if chosen is MultiprocessEngine:
        return MultiprocessEngine(shop, config.workers)
    from fedloom.engines.cuda.engine import CudaEngine

    return CudaEngine(shop, select_devices(config.device), config.slots)


def find_launcher(engine: str) -> Callable[..., Any] | None:
    """Find what starts the clients of an engine that has them elsewhere; None: they are on this machine."""
    if engine not in _LAUNCHERS:
        return None
    module, _, name = _LAUNCHERS[engine].partition(":")
    launcher: Callable[..., Any] = getattr(import_module(module), name)
    return launcher
