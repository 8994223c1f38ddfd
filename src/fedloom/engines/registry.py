"""Engine names to classes (lazy), choose_engine, create_engine."""

import torch

from fedloom.config import Config
from fedloom.devices.selection import select_device, select_devices
from fedloom.engines.base import Engine
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.engines.multiprocess.engine import multiprocess_engine_available as can_fork
from fedloom.engines.sequential import SequentialEngine
from fedloom.errors import InputError
from fedloom.training.local_training import EngineContext


def choose_engine(config: Config, device: torch.device) -> type[Engine]:
    """What runs the clients of such a run; `device` is the first of its devices."""
    if config.engine == "plain":
        if "," in config.device:
            raise InputError(f"the plain engine computes on one device, not on {config.device!r}.")
        return SequentialEngine
    if device.type == "cuda":
        return CudaEngine
    if not can_fork():
        if config.engine == "host":
            raise InputError("the host engine needs a system that can fork processes; use --engine plain.")
        return SequentialEngine
    return MultiprocessEngine


def make_engine(chosen: type[Engine], shop: EngineContext, config: Config) -> Engine:
    """The engine that was chosen, with as many workers, devices or slots as the config says."""
    if chosen is MultiprocessEngine:
        return MultiprocessEngine(shop, config.workers)
    if chosen is CudaEngine:
        return CudaEngine(shop, select_devices(config.device), config.slots)
    return SequentialEngine(shop, select_device(config.device))
