"""Messages to sites, drawn by Hypothesis."""

import math
from typing import Any

from hypothesis import strategies as st

from fedloom.flower.message import (
    SIZES,
    MessageArray,
    SiteMessage,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def blocks(draw: st.DrawFn) -> MessageArray:
    dtype = draw(st.sampled_from(sorted(SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * SIZES[dtype]
    return MessageArray(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


parcels = st.builds(
    SiteMessage,
    st.text(max_size=10),
    st.dictionaries(st.text(max_size=8), plain, max_size=4),
    st.dictionaries(st.text(max_size=8), blocks(), max_size=4),
)


def same(one: SiteMessage, other: SiteMessage) -> bool:
    def plain_blocks(parcel: SiteMessage) -> dict[str, Any]:
        return {name: (b.dtype, b.shape, bytes(b.data)) for name, b in parcel.arrays.items()}

    return (one.kind, one.header, plain_blocks(one)) == (other.kind, other.header, plain_blocks(other))
