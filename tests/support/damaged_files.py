"""Damaged copies of files, which a loader must reject with one sentence."""

import re
from collections.abc import Callable

from hypothesis import strategies as st

from fedloom.errors import InputError


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A way to break a file: cut off, with bytes changed, doubled, taken out, or with a header that says too much."""
    kind = draw(st.sampled_from(["cut", "change", "insert", "remove", "large", "swap", "garbage"]))
    where, length, value = draw(st.floats(0, 1)), draw(st.integers(1, 64)), draw(st.binary(min_size=64, max_size=64))

    def apply(content: bytes) -> bytes:
        at = int(where * max(len(content) - 1, 0))
        if kind == "cut":
            return content[:at]
        if kind == "change":
            return content[:at] + value[:length] + content[at + length :]
        if kind == "insert":
            return content[:at] + value[:length] + content[at:]
        if kind == "remove":
            return content[:at] + content[at + length :]
        if kind == "large":
            return content[:at] + b"\xff" * 8 + content[at + 8 :]
        if kind == "swap":
            return content[at:] + content[:at]
        return value[:length]

    return apply


def attempt(read: Callable[[], object]) -> str | None:
    """With which sentence `read()` refuses, or None where it works; anything else that it raises is a bug."""
    try:
        read()
    except InputError as error:
        said = str(error)
        assert "\n" not in said, said
        assert said.endswith("."), said
        assert len(said) < 1000, said
        assert not re.search(r"Traceback|object at 0x", said), said
        return said
    return None
