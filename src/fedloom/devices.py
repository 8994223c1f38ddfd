"""Which devices a run computes on, and which engine runs its clients there."""

import torch

from fedloom.config import Config
from fedloom.engines import CudaEngine, Engine, HostEngine, PlainEngine, Shop
from fedloom.engines.host import available as can_fork
from fedloom.errors import InputError


def make_device(name: str) -> torch.device:
    """The device called `name`, found to be usable; of several the first, where the server is."""
    return make_devices(name)[0]


def make_devices(names: str) -> tuple[torch.device, ...]:
    """The devices that `names` lists, separated by commas, found to be usable."""
    found = tuple(_usable_device(name.strip()) for name in names.split(","))
    if len(found) > 1 and (any(device.index is None for device in found) or len(set(found)) < len(found)):
        raise InputError(f"several devices are different ones, such as cuda:0,cuda:1, not {names!r}.")
    return found


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device is cpu, cuda, cuda:N or several as cuda:0,cuda:1, not {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device is cpu, cuda, cuda:N or several as cuda:0,cuda:1, not {name!r}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"device {name!r} cannot be used here: {reason}.") from error
    return device


def engine_class(config: Config, device: torch.device) -> type[Engine]:
    """What runs the clients of such a run; `device` is the first of its devices."""
    if config.engine == "plain":
        if "," in config.device:
            raise InputError(f"the plain engine computes on one device, not on {config.device!r}.")
        return PlainEngine
    if device.type == "cuda":
        return CudaEngine
    if not can_fork():
        if config.engine == "host":
            raise InputError("the host engine needs a system that can fork processes; use --engine plain.")
        return PlainEngine
    return HostEngine


def make_engine(chosen: type[Engine], shop: Shop, config: Config) -> Engine:
    """The engine that was chosen, with as many workers, devices or slots as the config says."""
    if chosen is HostEngine:
        return HostEngine(shop, config.workers)
    if chosen is CudaEngine:
        return CudaEngine(shop, make_devices(config.device), config.slots)
    return PlainEngine(shop, make_device(config.device))
