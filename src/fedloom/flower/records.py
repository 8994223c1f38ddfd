"""Parcels as Flower's records and back.

Flower's own way to store an array is numpy's file format. Ours is named by `STYPE`: the bytes of an array are its
numbers and nothing else, so that what comes is measured and never interpreted.
"""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.flower.parcel import MOST_BLOCKS, Block, Parcel, Refused, header_text, read_header

STYPE = "fedloom.raw"


def to_records(parcel: Parcel) -> RecordDict:
    """What Flower carries."""
    arrays = {
        name: Array(dtype=block.dtype, shape=block.shape, stype=STYPE, data=bytes(block.data))
        for name, block in parcel.blocks.items()
    }
    about = ConfigRecord({"kind": parcel.kind, "header": header_text(parcel.header)})
    return RecordDict({"fedloom": about, "blocks": ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Parcel:
    """The parcel that Flower carried; what is none is refused."""
    about: Any = records.get("fedloom")
    arrays: Any = records.get("blocks")
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord) or len(records) != 2:
        raise Refused("a message is not one of fedloom's")
    kind, header = about.get("kind"), about.get("header")
    if not isinstance(kind, str) or not isinstance(header, str) or len(arrays) > MOST_BLOCKS:
        raise Refused("a message is not one of fedloom's")
    blocks = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise Refused(f"an array is stored as {array.stype!r}, not as {STYPE!r}")
        blocks[name] = Block(array.dtype, tuple(array.shape), array.data)
    return Parcel(kind, read_header(header), blocks)
