"""Which devices a run computes on, by name. torch is loaded where it is asked for a device, not before."""

from typing import TYPE_CHECKING

from fedloom.errors import InputError

if TYPE_CHECKING:
    import torch


def select_auto_device(name: str, engine: str = "auto") -> str:
    """The device called `name`; for `auto` a GPU, where there is one and the engine may use it, or else the CPU."""
    if name != "auto":
        return name
    if engine == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if engine == "cuda" else "cpu"


def selects_only_gpus(device: str) -> bool:
    """Whether a run with this setting computes on one GPU or several."""
    return all(name.strip().partition(":")[0] == "cuda" for name in device.split(","))


def select_device(name: str) -> "torch.device":
    """The device called `name`, found to be usable; of several the first, where the server is."""
    return select_devices(name)[0]


def select_devices(names: str) -> "tuple[torch.device, ...]":
    """The devices that `names` lists, separated by commas, found to be usable."""
    found = tuple(_usable_device(name.strip()) for name in names.split(","))
    if len(found) > 1 and (any(device.index is None for device in found) or len(set(found)) < len(found)):
        raise InputError(f"several devices are different ones, such as cuda:0,cuda:1, not {names!r}.")
    return found


def _usable_device(name: str) -> "torch.device":
    import torch

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
