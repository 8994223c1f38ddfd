"""A line on the terminal while PyTorch loads, which takes seconds."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def show_loading(quiet: bool = False) -> Iterator[None]:
    """Show on stderr that PyTorch is loading, and wipe the line after the block. Without a terminal, show nothing."""
    shown = not quiet and "torch" not in sys.modules and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print("loading PyTorch ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
