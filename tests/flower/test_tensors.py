"""Tests of tensors in messages: equal bits, and selected columns only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.core.layout import Layout
from fedloom.flower.message import MessageArray, MessageRejected, SiteMessage, decode_message, encode_message
from fedloom.flower.tensors import NAMES, ModelTensorCodec, decode_tensor, encode_tensor


@given(st.sampled_from(sorted(NAMES.values())), st.lists(st.integers(0, 3), max_size=3), st.randoms())
def test_every_type_keeps_its_bits(name: str, shape: list[int], random: object) -> None:
    dtype = getattr(torch, name)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = bytes(random.randrange(2 if name == "bool" else 256) for _ in range(size))  # type: ignore[attr-defined]
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    block = decode_message(encode_message(SiteMessage("k", {}, {"t": encode_tensor(tensor)}))).arrays["t"]
    assert bytes(block.data) == raw  # NaNs and all
    back = decode_tensor(block, dtype, tuple(shape), "it")
    assert back.dtype == dtype
    assert tuple(back.shape) == tuple(shape)
    assert back.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == raw


def test_a_view_is_sent_as_what_it_shows() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    for view in (matrix.T, matrix[:, 1], matrix[::2]):
        assert torch.equal(decode_tensor(encode_tensor(view), torch.float32, tuple(view.shape), "it"), view)


@pytest.mark.parametrize("block", [encode_tensor(torch.zeros(3)), encode_tensor(torch.zeros(2, dtype=torch.float64))])
def test_another_shape_or_type_is_refused_by_name(block: MessageArray) -> None:
    with pytest.raises(MessageRejected, match=r"its model is float.* of shape .*, not float32 of shape \(2,\)"):
        decode_tensor(block, torch.float32, (2,), "its model")


@given(st.data())
def test_only_the_columns_that_travel_do(data: st.DataObject) -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    cuts = sorted(set(data.draw(st.lists(st.integers(0, layout.size), max_size=6))))
    stays = [slice(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    data.draw(st.randoms()).shuffle(stays)
    travel = ModelTensorCodec(layout, stays)
    sent, there = torch.randn(layout.size), torch.randn(layout.size)
    at_home = torch.zeros(layout.size, dtype=torch.bool)
    for part in stays:
        at_home[part] = True
    block = travel.encode(sent)
    assert block.shape == (int((~at_home).sum()),) == (travel.size,)
    found = travel.decode(block, there.clone())
    assert torch.equal(found, torch.where(at_home, there, sent))
