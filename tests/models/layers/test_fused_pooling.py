"""Tests of pooling fused with the bias and the ReLU after it.

A GPU uses Triton kernels, other devices PyTorch's.
"""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.models import build_model
from fedloom.models.layers import fused_relu, pooling
from fedloom.models.layers.fused_relu import FusedReLUSequential
from fedloom.models.layers.pooling import PooledConv2d, _MaxPoolReLUFunction

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def by_torch(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(x, 2) + bias.to(x.dtype).view(-1, 1, 1))


def step_by_step() -> Any:
    """What the kernels compute, in plain torch and any type."""

    def forward(x: Tensor, bias: Tensor, channels_last: bool) -> tuple[Tensor, Tensor]:
        four = torch.stack([x[:, :, i::2, j::2] for i in range(2) for j in range(2)])
        return by_torch(x, bias), four.argmax(0).to(torch.int8)

    def backward(g: Tensor, y: Tensor, which: Tensor, shape: torch.Size, channels_last: bool) -> tuple[Tensor, Tensor]:
        g, d_x = torch.where(y <= 0, 0, g), g.new_empty(shape)
        for k in range(4):
            d_x[:, :, k // 2 :: 2, k % 2 :: 2] = torch.where(which == k, g, 0)
        return d_x, g.sum((0, 2, 3))

    return SimpleNamespace(triton_pooling_forward=forward, triton_pooling_backward=backward)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_their_gradients(layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_load_pooling_kernels", step_by_step)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 6).double().contiguous(memory_format=layout).requires_grad_()
    inputs = (x, torch.randn(3).double().requires_grad_())
    assert torch.autograd.gradcheck(_MaxPoolReLUFunction.apply, inputs)
    assert torch.autograd.gradgradcheck(_MaxPoolReLUFunction.apply, inputs)
    found = [torch.autograd.grad(f(*inputs).pow(3).sum(), inputs) for f in (_MaxPoolReLUFunction.apply, by_torch)]
    torch.testing.assert_close(*found)
    found = [
        torch.autograd.grad(f(*inputs).pow(3).sum(), inputs, create_graph=True)
        for f in (_MaxPoolReLUFunction.apply, by_torch)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("side", [8, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_its_relu(side: int, bias: bool) -> None:
    layer, x = PooledConv2d(3, 5, 3, padding=1, bias=bias), torch.randn(2, 3, side, side)
    torch.testing.assert_close(layer.relu(x), F.relu(layer(x)), rtol=0, atol=0)


def test_networks_are_what_they_were() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 32, 32)
    for name in ("cnn", "lenet", "convnet", "convnet:norm=batch", "cnn:norm=batch"):
        module = build_model(name, (3, 32, 32), 10)
        assert isinstance(module, FusedReLUSequential)
        torch.testing.assert_close(module(x), nn.Sequential.forward(module, x), rtol=0, atol=0)


def test_triton_is_tried_out_once_by_whomever(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def tried(device: torch.device) -> bool:
        time.sleep(0.05)
        tries.append(device)
        return len(tries) == 1

    monkeypatch.setattr(fused_relu, "_answers", {})
    monkeypatch.setattr(fused_relu, "_tried", tried)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fused_relu.fused_relu_available, [torch.device("cuda:0")] * 8))
    assert len(tries) == 1


@pytest.mark.parametrize(("model", "to_the_bit", "tried"), [("cnn", False, 1), ("cnn", True, 0), ("mlp", False, 0)])
def test_triton_is_tried_out_where_it_may_be_used(
    model: str, to_the_bit: bool, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, tries, empty = build_model(model, (3, 32, 32), 10), list[torch.device](), torch.empty
    monkeypatch.setattr(fused_relu, "enabled", True)
    monkeypatch.setattr("fedloom.devices.precision._to_the_bit", to_the_bit)
    monkeypatch.setattr(fused_relu, "fused_relu_available", tries.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))
    fused_relu.prepare_fused_relu(module, torch.device("cuda"))
    assert len(tries) == tried


# The kernels themselves: on a GPU, or in Triton's interpreter.


@pytest.fixture(scope="module")
def kernels(triton: None) -> Any:
    return pooling._load_pooling_kernels()


def check(kernels: Any, x: Tensor) -> None:
    """To the last bit, but for the order in which the bias's gradient is summed up."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    bias = torch.randn(x.shape[1], device=x.device)
    y, which = kernels.triton_pooling_forward(x, bias, channels_last)
    x.requires_grad_()
    bias.requires_grad_()
    theirs = F.relu((F.max_pool2d(x, 2).float() + bias.view(-1, 1, 1)).to(x.dtype))
    assert torch.equal(y, theirs)
    assert y.stride() == theirs.stride() or x.shape[1] == 1 or y.shape[2:] == (1, 1)
    g = torch.randn_like(y)
    d_x, d_bias = kernels.triton_pooling_backward(g, y, which, x.shape, channels_last)
    wanted = torch.autograd.grad(theirs, [x, bias], g)
    assert torch.equal(d_x, wanted[0])
    torch.testing.assert_close(d_bias, wanted[1], rtol=1e-4, atol=1e-4)


sizes = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=40 if GPU else 15, deadline=None)
@given(size=sizes, layout=st.sampled_from(LAYOUTS), few=st.booleans(), seed=st.integers(0, 99))
def test_kernels_against_torch(
    kernels: Any, size: tuple[int, int, int, int], layout: torch.memory_format, few: bool, seed: int
) -> None:
    """Also where pixels are equal: the first of them counts."""
    torch.manual_seed(seed)
    count, channels, height, width = size
    x = torch.randn(count, channels, 2 * height, 2 * width, device=DEVICE)
    check(kernels, (x.round() if few else x).contiguous(memory_format=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_on_more_than_one_chunk(kernels: Any, layout: torch.memory_format) -> None:
    check(kernels, torch.randn(40, 3, 32, 32, device=DEVICE).contiguous(memory_format=layout))


def test_what_is_not_a_number_is_not_hidden(kernels: Any) -> None:
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    x[0, 1, 0, 0] = x[1, 2, 3, 2] = float("nan")
    y, _ = kernels.triton_pooling_forward(x, torch.zeros(3, device=DEVICE), False)
    assert torch.equal(y.isnan(), F.max_pool2d(x, 2).isnan())
    assert y.isnan().sum() == 2


def test_a_kernel_that_could_not_be_loaded_is_forgotten(kernels: Any) -> None:
    class Kernel:
        device_caches: ClassVar = {0: "taken for loaded"}

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    plan = kernels._Plan(torch.Size((1, 1, 2, 2)), False)
    for _ in range(2):  # and nobody waits for who has failed
        with pytest.raises(RuntimeError, match="out of memory"):
            plan.launch(Kernel(), 1)
    assert Kernel.device_caches == {}


def test_the_first_try(triton: None) -> None:
    assert fused_relu._tried(torch.device(DEVICE))


@pytest.mark.gpu
@pytest.mark.usefixtures("fusing_on_a_gpu")
class TestOnAGpu:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("channels", [6, 32, 64])
    def test_bf16(self, kernels: Any, layout: torch.memory_format, channels: int) -> None:
        x = torch.randn(50, channels, 32, 32, device="cuda", dtype=torch.bfloat16)
        check(kernels, x.contiguous(memory_format=layout))

    @pytest.mark.parametrize("precision", ["fp32", "tf32"])
    def test_only_where_rounding_may_differ(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedloom.devices.precision._to_the_bit", precision == "fp32")
        layer, x = PooledConv2d(3, 6, 5).cuda(), torch.randn(4, 3, 32, 32, device="cuda")
        assert type(layer.relu(x).grad_fn).__name__ == ("PoolReLUBackward" if precision == "tf32" else "ReluBackward0")

    @pytest.mark.parametrize("model", ["cnn", "lenet"])
    def test_networks_go_where_they_went(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        torch.manual_seed(0)
        module, x = build_model(model, (3, 32, 32), 10).cuda(), torch.randn(50, 3, 32, 32, device="cuda")
        y, found = torch.arange(50, device="cuda") % 10, []
        for fused in (True, False):
            if not fused:
                monkeypatch.setattr(fused_relu, "fused_relu_available", lambda _: False)
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
            found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
        assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-4

    @pytest.mark.parametrize("model", ["lenet", "resnet20"])
    def test_a_network_can_still_be_traced(self, model: str) -> None:
        module, x = build_model(model, (3, 32, 32), 10).cuda().eval(), torch.randn(4, 3, 32, 32, device="cuda")
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # that the number of channels is as it was
            traced = torch.jit.trace(module, x)
        for other in (x, torch.randn_like(x)):
            torch.testing.assert_close(traced(other), module(other))
