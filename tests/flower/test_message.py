"""Tests of site messages: round trip, and rejection of invalid bytes."""

import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.flower.message import (
    ADDRESS,
    MOST_HEADER,
    MessageArray,
    MessageRejected,
    SiteMessage,
    decode_message,
    encode_message,
    make_failure_message,
    read_message,
    write_message,
)
from tests.support.messages import parcels, same


@given(parcels)
def test_what_was_packed_comes_out(parcel: SiteMessage) -> None:
    assert same(decode_message(encode_message(parcel)), parcel)


@given(parcels, st.data())
def test_changed_bytes_are_refused_or_are_another_parcel(parcel: SiteMessage, data: st.DataObject) -> None:
    content = bytearray(encode_message(parcel))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    try:
        found = decode_message(bytes(content[:cut]))
    except MessageRejected:
        return
    assert cut == len(content)
    assert sum(len(b.data) for b in found.arrays.values()) == parcel.nbytes


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(MessageRejected):
        decode_message(content)


def test_a_declared_size_is_believed_only_within_bounds() -> None:
    huge = struct.pack("<4sIQ", b"FLM1", 10, 1 << 60)
    with pytest.raises(MessageRejected, match="more than"):
        decode_message(huge)
    with pytest.raises(MessageRejected, match="more than 100"):
        decode_message(encode_message(SiteMessage("k", {}, {"a": MessageArray.raw(b"x" * 101)})), max_bytes=100)
    assert (
        decode_message(encode_message(SiteMessage("k", {}, {"a": MessageArray.raw(b"x" * 100)})), max_bytes=100).nbytes
        == 100
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float32", (3,), b"\0" * 11),
        ("float32", (3,), b"\0" * 13),
        ("object", (1,), b"\0" * 8),
        ("float32", (-1,), b""),
        ("float32", (1 << 60, 1 << 60), b""),
        ("float32", (1.0,), b"\0" * 4),
        ("uint8", (True,), b"\0"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(dtype: str, shape: Any, data: bytes) -> None:
    with pytest.raises(MessageRejected):
        MessageArray(dtype, shape, data)


def test_a_long_header_is_refused_on_both_sides() -> None:
    with pytest.raises(MessageRejected, match="header"):
        encode_message(SiteMessage("k", {"a": "x" * MOST_HEADER}))


def test_an_answer_repeats_what_its_question_says_of_itself() -> None:
    address = {"run": "r", "round": 3, "client_id": 4, "nonce": "n"}
    question = SiteMessage("train", {**address, "accepted": "before"})
    answer = question.reply("trained", {"loss": 1.0, "round": 99})
    assert {key: answer.header[key] for key in ADDRESS} == address
    assert "accepted" not in answer.header
    assert make_failure_message(question, "x" * 1000).header == {**address, "reason": "x" * 300}


def test_parcels_pass_through_a_socket_one_after_the_other() -> None:
    one, other = socket.socketpair()
    big = SiteMessage("big", {"n": 1}, {"model": MessageArray("float32", (1 << 20,), bytes(4 << 20))})

    def write() -> None:
        with one:
            write_message(one, big)
            write_message(one, SiteMessage("small"))

    writer = threading.Thread(target=write)
    writer.start()
    with other:
        first, second, third = read_message(other), read_message(other), read_message(other)
    writer.join()
    assert first is not None
    assert same(first, big)
    assert second == SiteMessage("small")
    assert third is None


def test_a_parcel_that_is_cut_off_on_its_way_is_refused() -> None:
    for keep in (1, 15, 17, 40):
        one, other = socket.socketpair()
        with other:
            with one:
                one.sendall(
                    encode_message(SiteMessage("k", {"a": 1}, {"model": MessageArray.raw(b"0123456789")}))[:keep]
                )
            with pytest.raises(MessageRejected, match="cut off"):
                read_message(other)
