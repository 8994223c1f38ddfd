"""Parcels as Flower's records and back.

Flower's own way to store an array is numpy's file format. Ours is named by `STYPE`: the bytes of an array are its
numbers and nothing else, so that what comes is measured and never interpreted.
"""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.flower.message import (
    MOST_BLOCKS,
    MessageArray,
    MessageRejected,
    SiteMessage,
    decode_message_header,
    encode_message_header,
)

STYPE = "fedloom.raw"


def message_to_flower_records(parcel: SiteMessage) -> RecordDict:
    """What Flower carries."""
    arrays = {
        name: Array(dtype=block.dtype, shape=block.shape, stype=STYPE, data=bytes(block.data))
        for name, block in parcel.blocks.items()
    }
    about = ConfigRecord({"kind": parcel.kind, "header": encode_message_header(parcel.header)})
    return RecordDict({"fedloom": about, "blocks": ArrayRecord(arrays)})


def message_from_flower_records(records: RecordDict) -> SiteMessage:
    """The parcel that Flower carried; what is none is refused."""
    about: Any = records.get("fedloom")
    arrays: Any = records.get("blocks")
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord) or len(records) != 2:
        raise MessageRejected("a message is not one of fedloom's")
    kind, header = about.get("kind"), about.get("header")
    if not isinstance(kind, str) or not isinstance(header, str) or len(arrays) > MOST_BLOCKS:
        raise MessageRejected("a message is not one of fedloom's")
    blocks = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise MessageRejected(f"an array is stored as {array.stype!r}, not as {STYPE!r}")
        blocks[name] = MessageArray(array.dtype, tuple(array.shape), array.data)
    return SiteMessage(kind, decode_message_header(header), blocks)
