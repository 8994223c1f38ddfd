"""Tests that FedCross compares models in float64 on every device.

float32 could choose another collaborator.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.methods import MethodContext
from fedloom.methods.base import ServerResources
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer

WIDTH = 40_000
network = partial(nn.Linear, WIDTH, 1, bias=False)


def rows_of(seed: int, count: int, drift: float, outlier: float) -> Tensor:
    """Models that drifted apart from one, each by its own length, the first of them perhaps far away."""
    draw = torch.Generator().manual_seed(seed)
    lengths = 0.5 + torch.rand(count, 1, generator=draw)
    rows = torch.randn(1, WIDTH, generator=draw) + drift * lengths * torch.randn(count, WIDTH, generator=draw)
    rows[0] += outlier * torch.randn(WIDTH, generator=draw)
    return rows


def server_of(count: int) -> FedCrossServer:
    layout = Layout.of(network())
    context = MethodContext(
        layout=layout, initial=layout.empty(), num_clients=9, clients_per_round=count, planned_rounds=3,
        rng_streams=RngStreams(0),
        config=TrainingConfig(), num_examples=lambda _: 1, criterion=nn.functional.mse_loss, make_model=network,
        classes=0, shape=(WIDTH,),
        server=ServerResources(torch.device("cpu"), lambda rows, width: Bank.memory(rows, width)),
    )  # fmt: skip
    return FedCrossServer(context, FedCrossOptions())


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(3, 8),
    # About an outlier even float64 has its limits: a millionth of a millionth of its distance.
    st.sampled_from([(1.0, 0.0), (1e-2, 0.0), (1e-4, 0.0), (1e-6, 0.0), (1e-2, 1.0), (1e-4, 1.0), (1e-2, 100.0)]),
    st.sampled_from([1, -1]),
)
def test_it_chooses_what_the_definition_says(seed: int, count: int, apart: tuple[float, float], sign: int) -> None:
    server, v = server_of(count), rows_of(seed, count, *apart)
    units = v.double() / v.double().norm(dim=1, keepdim=True)
    gaps = torch.stack([(units - unit).square().sum(1) / 2 for unit in units])
    wanted = (sign * gaps + torch.diag(torch.full((count,), torch.inf, dtype=torch.float64))).argmin(1).tolist()
    assert server.extremes(v, sign) == wanted


def test_numbers_too_large_for_float32_sums_are_ranked_too() -> None:
    v = rows_of(3, 4, 1.0, 0.0) * 1e18
    server = server_of(4)
    assert server.extremes(v, -1) == server.extremes(v / 1e18, -1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("apart", [(1.0, 0.0), (1e-2, 0.0), (1e-4, 0.0), (1e-2, 1.0)])
def test_it_chooses_the_same_on_a_gpu_that_computes_in_tf32(apart: tuple[float, float]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for seed in range(20):
            v = rows_of(seed, 8, *apart)
            for sign in (1, -1):
                assert server_of(8).extremes(v.cuda(), sign) == server_of(8).extremes(v, sign)
    finally:
        torch.set_float32_matmul_precision(before)
