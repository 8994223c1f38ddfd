"""Convert a `SiteMessage` to Flower's records and back.

Flower itself stores an array in numpy's file format. With the type `STYPE` the bytes of an array are its numbers and
nothing else, so received arrays are measured and never interpreted.
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


def message_to_flower_records(message: SiteMessage) -> RecordDict:
    """Return a message as Flower's records."""
    arrays = {
        name: Array(dtype=array.dtype, shape=array.shape, stype=STYPE, data=bytes(array.data))
        for name, array in message.arrays.items()
    }
    about = ConfigRecord({"kind": message.kind, "header": encode_message_header(message.header)})
    return RecordDict({"fedloom": about, "arrays": ArrayRecord(arrays)})


def message_from_flower_records(records: RecordDict) -> SiteMessage:
    """Return the message in Flower's records; reject any other content."""
    about: Any = records.get("fedloom")
    arrays: Any = records.get("arrays")
    if not isinstance(about, ConfigRecord) or not isinstance(arrays, ArrayRecord) or len(records) != 2:
        raise MessageRejected("the records are not a message of fedloom")
    kind, header = about.get("kind"), about.get("header")
    if not isinstance(kind, str) or not isinstance(header, str) or len(arrays) > MOST_BLOCKS:
        raise MessageRejected("the records are not a message of fedloom")
    message_arrays = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise MessageRejected(f"an array is stored as {array.stype!r}, not as {STYPE!r}")
        message_arrays[name] = MessageArray(array.dtype, tuple(array.shape), array.data)
    return SiteMessage(kind, decode_message_header(header), message_arrays)
