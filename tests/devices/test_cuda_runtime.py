"""Tests that copies of many tensors keep every value, place and type."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.devices import cuda_runtime

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@given(SIZES, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(1, 12))
def test_every_tensor_is_copied_once(sizes: list[int], dtype: torch.dtype, large: int) -> None:
    draw = torch.Generator().manual_seed(sum(sizes))
    sources = [torch.randn(size, generator=draw) for size in sizes]
    whole = torch.full((sum(sizes) + 2,), torch.nan, dtype=dtype)  # targets are parts of one row, with others around
    targets = torch.split(whole[1:-1], sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_runtime, "LARGE", large)
        cuda_runtime.cuda_foreach_copy_(targets, sources)
    assert torch.equal(whole[1:-1], torch.cat(sources).to(dtype))
    assert whole[[0, -1]].isnan().all()


def test_as_many_sources_as_targets() -> None:
    with pytest.raises(ValueError, match="shorter"):
        cuda_runtime.cuda_foreach_copy_([torch.zeros(1), torch.zeros(1)], [torch.ones(1)])
