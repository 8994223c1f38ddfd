"""Helpers for processes, paths, ports and a user's Python file.

This file imports nothing heavy.
"""

import ctypes
import importlib
import importlib.util
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from fedloom.errors import FedloomError, InputError


def run_user_file(path: Path, module_name: str) -> ModuleType:
    """Import the file at `path` as the module `module_name`, only once."""
    file = path.resolve()
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"'{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except FedloomError:
        del sys.modules[module_name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, so that a killed parent leaves no workers behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of large activations instead of giving it back to the kernel at every step.

    Otherwise each step may fault the same pages in again (benchmarks/choices.py measures the effect on a machine).
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; musl has none
        if mallopt is not None:
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def expand_user_path(text: str) -> Path:
    """Expand ~ in a path. The path of an unknown user stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def available_cpu_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def make_private_directory(folder: Path) -> None:
    """Create a folder that only its owner can read."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is not writable")
    except OSError as error:
        raise InputError(f"cannot use the site's folder {folder}: {error.strerror or error}.") from None
