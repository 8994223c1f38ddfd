"""Select devices by name. PyTorch is imported only when a device is created."""

from typing import TYPE_CHECKING

from fedloom.errors import InputError, first_line_of_error

if TYPE_CHECKING:
    import torch


def select_auto_device(name: str, engine: str = "auto") -> str:
    """Return `name`, or for `auto` a GPU if there is one and the engine may use it, and otherwise the CPU."""
    if name != "auto":
        return name
    if engine == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if engine == "cuda" else "cpu"


def selects_only_gpus(devices: str) -> bool:
    """Return whether all devices of this setting are GPUs."""
    return all(name.strip().partition(":")[0] == "cuda" for name in devices.split(","))


def select_device(name: str) -> "torch.device":
    """Return the first device that `name` lists, which is the server's, after checking that all are usable."""
    return select_devices(name)[0]


def select_devices(names: str) -> "tuple[torch.device, ...]":
    """Return the devices in a comma-separated list, after checking that they are usable."""
    found = tuple(_usable_device(name.strip()) for name in names.split(","))
    if len(found) > 1 and (any(device.index is None for device in found) or len(set(found)) < len(found)):
        raise InputError(f"several devices must have different numbers, such as cuda:0,cuda:1, not {names!r}.")
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
        reason = first_line_of_error(error)
        raise InputError(f"device {name!r} cannot be used here: {reason}.") from error
    return device
