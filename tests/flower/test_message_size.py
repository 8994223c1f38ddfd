"""Tests that the size of a message is checked before it is in memory."""

from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)

from fedloom.flower.flwr_patches import SPARE, GridSizeLimitPatch, _unfolded_size, patched_error_reason
from fedloom.flower.message import MessageArray, SiteMessage
from fedloom.flower.records import message_from_flower_records, message_to_flower_records

pytestmark = pytest.mark.flower
PIECE = 5 << 20
"""Bytes of the pieces that Flower cuts arrays into."""


class Store:
    """A SuperLink's store with one answer in it."""

    def __init__(self, *blocks: MessageArray) -> None:
        records = message_to_flower_records(
            SiteMessage("trained", {"round": 1}, {f"block-{k}": block for k, block in enumerate(blocks)})
        )
        with no_object_id_recompute():
            self.contents = {key: each.deflate() for key, each in get_all_nested_objects(records).items()}
            self.order = [tree.object_id for tree in iterate_object_tree(get_object_tree(records))]
        self.fetched = 0

    def fetch(self, object_id: str) -> bytes:
        self.fetched += len(self.contents[object_id])
        return self.contents[object_id]

    def pull(self, most: int) -> SiteMessage:
        """What the Grid does with a guard in front of it."""
        guard = GridSizeLimitPatch(lambda: most)
        guard._pull = inflatable_utils.pull_objects
        guard._inflate = inflatable_utils.inflate_object_from_contents
        records: Any = guard.inflate(self.order[-1], guard.pull(self.order, self.fetch))
        return message_from_flower_records(records)


def noise(size: int) -> bytes:
    """Bytes whose pieces are all different."""
    return b"".join(number.to_bytes(8, "little") for number in range(size // 8))


def refusal(store: Store, most: int) -> str:
    with pytest.raises(inflatable_utils.ObjectPullError) as refused:
        store.pull(most)
    reason = patched_error_reason(f"Reply message objects are unavailable. {refused.value}")
    assert reason is not None
    return reason


def test_what_is_not_too_large_comes_as_it_was() -> None:
    blocks = MessageArray.raw(noise(PIECE + 8)), MessageArray.raw(b""), MessageArray.raw(b"abc")
    came = Store(*blocks).pull(PIECE + 11)
    assert [bytes(block.data) for block in came.arrays.values()] == [bytes(block.data) for block in blocks]
    assert came.header == {"round": 1}


def test_fetching_stops_where_an_answer_is_too_large() -> None:
    store = Store(MessageArray.raw(noise(8 * PIECE)))
    assert refusal(store, PIECE) == f"rejected: it has more than {PIECE + SPARE} bytes"
    assert store.fetched <= 4 * PIECE  # at most what was on its way when it was noticed


def test_equal_pieces_are_counted_as_often_as_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(MessageArray.raw(bytes(20 * PIECE)))
    assert sum(map(len, store.contents.values())) < 2 * PIECE  # so much travels
    assert _unfolded_size(store.contents) >= 20 * PIECE
    inflate = inflatable_utils.inflate_object_from_contents
    unfolds: list[str] = []
    monkeypatch.setattr(inflatable_utils, "inflate_object_from_contents", lambda *a, **k: unfolds.append(a[0]))
    assert refusal(store, 2 * PIECE).startswith("rejected: it has more than")
    assert not unfolds
    monkeypatch.setattr(inflatable_utils, "inflate_object_from_contents", inflate)
    assert store.pull(20 * PIECE + SPARE).nbytes == 20 * PIECE


def test_what_cannot_be_put_together_is_refused() -> None:
    store = Store(MessageArray.raw(b"abc"))
    array = next(key for key, content in store.contents.items() if content.startswith(b"Array "))
    store.contents[array] = store.contents[array].replace(b"arraychunk_ids", b"arraychunk_idx")
    assert refusal(store, 100) == "rejected: it is not a message (KeyError)"


def test_a_message_of_very_many_pieces_is_refused_unfetched() -> None:
    store = Store(MessageArray.raw(b"abc"))
    store.order = [store.order[0]] * 20_000 + store.order
    assert refusal(store, 100) == f"rejected: it has {len(store.order)} pieces"
    assert store.fetched == 0


def test_one_piece_is_judged_by_its_length_before_it_is_read() -> None:
    import httpx

    guard = GridSizeLimitPatch(lambda: 100)
    request = httpx.Request("POST", "https://server/v1/runtime/pull-object")
    guard.check_response(httpx.Response(200, headers={"content-length": str(100 + SPARE)}, request=request))
    with pytest.raises(inflatable_utils.ObjectPullError, match="more than"):
        guard.check_response(httpx.Response(200, headers={"content-length": str(101 + SPARE)}, request=request))
    other = httpx.Request("POST", "https://server/v1/runtime/get-nodes")
    guard.check_response(httpx.Response(200, headers={"content-length": str(1 << 40)}, request=other))
