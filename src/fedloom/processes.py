"""What a process asks of the system for itself. Nothing heavy is imported here: short-lived processes use it too."""

import ctypes
import signal
import sys


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
