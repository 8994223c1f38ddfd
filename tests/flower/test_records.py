"""Tests of site messages as Flower records."""

import subprocess
import sys

import pytest
from hypothesis import given

from fedloom.flower.message import MessageArray, MessageRejected, SiteMessage
from tests.support.messages import parcels, same

pytestmark = pytest.mark.flower


@given(parcels)
def test_what_flower_carries_comes_out(parcel: SiteMessage) -> None:
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    from fedloom.flower.records import message_from_flower_records, message_to_flower_records

    assert same(
        message_from_flower_records(recorddict_from_proto(recorddict_to_proto(message_to_flower_records(parcel)))),
        parcel,
    )


def test_other_records_are_refused() -> None:
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedloom.flower.records import message_from_flower_records, message_to_flower_records

    good = message_to_flower_records(SiteMessage("train", {}, {"model": MessageArray("float32", (1,), bytes(4))}))
    about, array = good["fedloom"], Array(np.zeros(3, dtype=np.float32))
    short = Array(dtype="float32", shape=(4,), stype="fedloom.raw", data=bytes(4))
    for records in (
        RecordDict(),
        RecordDict({"fedloom": about}),
        RecordDict({"fedloom": about, "arrays": about}),
        RecordDict({"fedloom": about, "arrays": ArrayRecord({"model": array})}),
        RecordDict({"fedloom": about, "arrays": ArrayRecord({"model": short})}),
        RecordDict({"fedloom": ConfigRecord({"kind": 3, "header": "{}"}), "arrays": ArrayRecord()}),
        RecordDict({"fedloom": ConfigRecord({"kind": "k", "header": "[1]"}), "arrays": ArrayRecord()}),
        RecordDict({"fedloom": ConfigRecord({"kind": "k", "header": "{" * 9999}), "arrays": ArrayRecord()}),
    ):
        with pytest.raises(MessageRejected):
            message_from_flower_records(records)


def test_records_do_not_load_torch() -> None:
    """Flower's processes import this module; PyTorch takes seconds to load."""
    code = "import sys; import fedloom.flower.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
