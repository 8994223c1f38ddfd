"""Process helpers, paths, ports, and running a user's Python file. Imports nothing heavy."""

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


def run_user_file(path: Path, name: str) -> ModuleType:
    """Run the file at `path` as the module `name`; the same file again is not run twice."""
    file = path.resolve()
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"'{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedloomError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def die_with_parent() -> None:
    """End with the process that started this one: whoever is killed outright must not leave others behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of large activations instead of giving it back to the kernel at every step.

    Otherwise a step may fault the same pages in again: between nothing and an eighth of the time of McMahan's CNN was
    seen (benchmarks/choices.py).
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; musl has none
        if mallopt is not None:
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def expand_user_path(text: str) -> Path:
    """A path in which ~ is the user's folder; of a user who does not exist it stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def available_cpu_count() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def make_private_directory(folder: Path) -> None:
    """Make a folder that only its owner can look into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is not writable")
    except OSError as error:
        raise InputError(f"cannot use the site's folder {folder}: {error.strerror or error}.") from None
