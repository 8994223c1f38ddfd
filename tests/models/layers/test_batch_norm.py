"""Tests of batch norm fused with the sum and the ReLU after it.

A GPU uses Triton kernels, other devices PyTorch's.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.models import build_model
from fedloom.models.layers import norms
from fedloom.models.layers.fused_relu import FusedReLUSequential
from fedloom.models.layers.norms import (
    BatchNorm2d,
    StatelessBatchNorm2d,
    _BatchNormReLUFunction,
    normalize_and_activate,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def maps(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers around 3, which also have to be found again after the mean is gone."""
    x = torch.randn(*shape, device=DEVICE, dtype=dtype) * 2 + 3
    return x.contiguous(memory_format=torch.channels_last)


def by_torch(x: Tensor, beside: Tensor | None, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5)
    y = y if beside is None else y + beside
    return F.relu(y) if relu else y


def step_by_step() -> Any:
    """What the kernels compute, in plain torch and any type."""

    def forward(x: Tensor, beside: Any, weight: Tensor, bias: Tensor, running: Any, momentum: float, eps: float,
                relu: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        saved = torch.stack([mean, 1 / (variance + eps).sqrt()])
        if running is not None:
            running[0].lerp_(mean, momentum)
            running[1].lerp_(x.var((0, 2, 3)), momentum)
            running[2].add_(1)
        y = (x - mean[:, None, None]) * (saved[1] * weight)[:, None, None] + bias[:, None, None]
        y = y if beside is None else y + beside
        return (y.clamp(min=0) if relu else y), saved

    def backward(g: Tensor, x: Tensor, y: Tensor, weight: Tensor, saved: Tensor, relu: bool, beside: bool) -> Any:
        g = torch.where(y <= 0, 0.0, g) if relu else g
        normal = (x - saved[0][:, None, None]) * saved[1][:, None, None]
        d_bias, d_weight = g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))
        count = x.numel() / x.shape[1]
        inner = g - d_bias[:, None, None] / count - normal * d_weight[:, None, None] / count
        return inner * (saved[1] * weight)[:, None, None], g if beside else None, d_weight, d_bias

    return SimpleNamespace(triton_batch_norm_forward=forward, triton_batch_norm_backward=backward)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_gradients_and_their_gradients(relu: bool, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for gradients of gradients, as DynaFed does, gets them from torch's operations."""
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 2, 2, 2).double(), torch.randn(2).double(), torch.randn(2).double()
    inputs = [tensor.requires_grad_() for tensor in (x, torch.randn_like(x), weight, bias)]

    def fused(x: Tensor, beside: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = _BatchNormReLUFunction.apply(x, beside if added else None, weight, bias, None, 0.1, 1e-5, relu)
        return y if added else y + 0 * beside

    assert torch.autograd.gradcheck(fused, inputs)
    assert torch.autograd.gradgradcheck(fused, inputs)


def test_gradients_of_gradients_with_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    x = torch.randn(3, 2, 2, 2, dtype=torch.double, requires_grad=True)
    weight, bias = torch.rand(2).double(), torch.rand(2).double()
    assert torch.autograd.gradgradcheck(
        lambda x: _BatchNormReLUFunction.apply(x, None, weight, bias, None, 0.1, 1e-5, True), [x]
    )


@pytest.mark.parametrize("model", ["resnet20:width=2", "resnet18:width=2", "resnet20-bottleneck:width=2"])
def test_gradients_of_gradients_of_whole_networks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside a layer may be what its input was computed from; that way must not count twice."""
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    torch.manual_seed(0)
    module, x = build_model(model, (3, 8, 8), 10).double(), torch.randn(6, 3, 8, 8).double().requires_grad_()
    found = []
    for fused in (True, False):
        monkeypatch.setattr(BatchNorm2d, "_may_fuse", lambda self, x, fused=fused: fused)
        loss = F.cross_entropy(module(x), torch.arange(6))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        weights = [weight for name, weight in module.named_parameters() if not name.startswith("norm.")]
        found.append([first, *torch.autograd.grad(first.square().sum(), weights, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [BatchNorm2d, StatelessBatchNorm2d])
@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_does_what_torchs_does(kind: type[BatchNorm2d], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    monkeypatch.setattr(kind, "_may_fuse", lambda self, x: fused and (self.training or self.running_mean is None))
    ours, theirs = kind(5), nn.BatchNorm2d(5, track_running_stats=kind is BatchNorm2d)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.uniform_(0.5, 2.0)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        x, beside = torch.randn(4, 5, 3, 3) + 1, torch.randn(4, 5, 3, 3)
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.relu(x), F.relu(theirs(x)))
        torch.testing.assert_close(normalize_and_activate(ours, x, beside), F.relu(theirs(x) + beside))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours.relu(x, beside), F.relu(theirs(x) + beside))


def test_who_watches_a_layer_sees_what_goes_through() -> None:
    norm, relu, seen = BatchNorm2d(3), nn.ReLU(), list[Tensor]()
    chain, x = FusedReLUSequential(nn.Conv2d(3, 3, 1), norm, relu), torch.randn(2, 3, 4, 4)
    for layer in (norm, relu):
        layer.register_forward_hook(lambda *given: seen.append(given[2]))
    y = chain(x)
    assert len(seen) == 2
    torch.testing.assert_close(F.relu(seen[0]), seen[1])
    torch.testing.assert_close(seen[1], y)


def test_a_chain_is_a_sequence_of_layers() -> None:
    """Also where a ReLU comes first, two come in a row, or the last layer is a norm."""
    torch.manual_seed(0)
    layers = [nn.ReLU(), BatchNorm2d(3), nn.ReLU(), nn.ReLU(), BatchNorm2d(3), nn.Dropout(0.0), BatchNorm2d(3)]
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(FusedReLUSequential(*layers)(x), nn.Sequential(*layers)(x), rtol=0, atol=0)


def test_a_vgg_is_still_the_network_it_was() -> None:
    torch.manual_seed(0)
    ours, x = build_model("vgg16", (3, 32, 32), 10).eval(), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), nn.Sequential.forward(ours, x), rtol=0, atol=0)


# The kernels themselves: on a GPU, or in Triton's interpreter.


@pytest.fixture(scope="module")
def kernels(triton: None) -> Any:
    return norms._load_norm_kernels()


sizes = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=40 if GPU else 15, deadline=None)
@given(size=sizes, relu=st.booleans(), added=st.booleans(), seed=st.integers(0, 99))
def test_kernels_against_torch_in_double(
    kernels: Any, size: tuple[int, int, int, int], relu: bool, added: bool, seed: int
) -> None:
    assume(size[0] * size[2] * size[3] > 4)  # of two numbers all that is left is their order
    check(kernels, size, relu, added, seed)


def test_kernels_on_more_than_one_chunk(kernels: Any) -> None:
    check(kernels, (130, 5, 16, 16), True, True, 0)
    check(kernels, (2, 3, 200, 200), False, False, 1)
    check(kernels, (3, 70, 13, 13), True, False, 2)


@pytest.mark.parametrize("order", ["usual", "expanded"])
def test_kernels_take_what_lies_in_another_order(kernels: Any, order: str) -> None:
    """Gradients of means are expanded, and a shortcut may come in any order."""
    torch.manual_seed(0)
    x, one = maps(4, 5, 3, 3), torch.rand(5, device=DEVICE)
    if order == "usual":
        beside, g = (torch.randn(4, 5, 3, 3, device=DEVICE) for _ in range(2))
    else:
        beside, g = (torch.randn(4, 5, 1, 1, device=DEVICE).expand(4, 5, 3, 3) for _ in range(2))
    found = []
    for there, back in ((beside, g), (maps(4, 5, 3, 3).copy_(beside), maps(4, 5, 3, 3).copy_(g))):
        y, saved = kernels.triton_batch_norm_forward(x, there, one, one, None, 0.1, 1e-5, True)
        found.append([y, *kernels.triton_batch_norm_backward(back, x, y, one, saved, True, True)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_nothing_goes_back_through_zeros(kernels: Any) -> None:
    x, one = maps(4, 3, 2, 2), torch.ones(3, device=DEVICE)
    y, saved = kernels.triton_batch_norm_forward(x, None, 0 * one, 0 * one, None, 0.1, 1e-5, True)
    assert not y.any()
    _, _, d_weight, d_bias = kernels.triton_batch_norm_backward(torch.ones_like(y), x, y, one, saved, True, False)
    assert not d_weight.any()
    assert not d_bias.any()


def check(
    kernels: Any, size: tuple[int, int, int, int], relu: bool, added: bool, seed: int,
    dtype: torch.dtype = torch.float32, tolerance: float = 1e-4,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x = maps(*size, dtype=dtype)
    beside = torch.randn_like(x) if added else None
    weight, bias = (torch.rand(size[1], device=DEVICE) + 0.5 for _ in range(2))
    running = torch.randn(size[1], device=DEVICE), torch.rand(size[1], device=DEVICE)
    expected = [tensor.clone().double() for tensor in running]
    counter = torch.tensor(seed, device=DEVICE)
    y, saved = kernels.triton_batch_norm_forward(x, beside, weight, bias, (*running, counter), 0.3, 1e-5, relu)
    assert counter == seed + 1
    wide = [None if tensor is None else tensor.double().requires_grad_() for tensor in (x, beside, weight, bias)]
    given = [tensor for tensor in wide if tensor is not None]
    exact = by_torch(*wide, relu)  # type: ignore[arg-type]
    F.batch_norm(wide[0], *expected, None, None, True, 0.3)  # type: ignore[arg-type]
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, exact, tolerance)
    for ours, theirs in zip(running, expected, strict=True):
        close(ours, theirs, 1e-4)
    # Where the output is undecided in the last bit the gradient jumps, and with it all others of the channel.
    g = torch.randn_like(y) * (exact.abs() > 1e-3)
    grads = [
        grad for grad in kernels.triton_batch_norm_backward(g, x, y, weight, saved, relu, added) if grad is not None
    ]
    for ours, theirs in zip(grads, torch.autograd.grad(exact, given, g.double()), strict=True):
        close(ours, theirs, tolerance)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    theirs = theirs.detach()
    assert float((ours.double() - theirs).norm()) <= tolerance * float(theirs.norm()) + tolerance


def test_what_is_not_a_number_is_not_hidden(kernels: Any) -> None:
    x, one = maps(4, 3, 2, 2), torch.ones(3, device=DEVICE)
    x[0, 1, 0, 0] = float("nan")
    y, saved = kernels.triton_batch_norm_forward(x, None, one, one, None, 0.1, 1e-5, True)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()
    d_x, *_ = kernels.triton_batch_norm_backward(torch.ones_like(y), x, y, one, saved, True, False)
    assert d_x[:, 1].isnan().all()


@pytest.mark.parametrize("why", ["channels", "stride", "momentum", "type", "single", "order", "counter", "eval"])
def test_what_is_not_as_usual_is_left_to_torch(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.models.layers.fused_relu.can_use_fused_relu", lambda _: True)
    norm, x = BatchNorm2d(4), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert norm._may_fuse(x)
    if why == "channels":
        x = x[:, :3]
    elif why == "stride":
        norm.running_mean = torch.zeros(8)[::2]
    elif why == "momentum":
        norm.momentum = None
    elif why == "type":
        norm.double()
    elif why == "order":
        x = x.contiguous()
    elif why == "counter":
        norm.num_batches_tracked = None
    elif why == "eval":
        norm.eval()
    else:
        x = x[:1, :, :1, :1]
    assert not norm._may_fuse(x)


@pytest.mark.parametrize("beside", [None, (2, 4, 3, 3), (1, 4, 1, 1), "float64"])
@pytest.mark.parametrize("hook", [False, True])
def test_what_is_beside_a_layer_is_fused_if_it_is_like_it(
    beside: Any, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    monkeypatch.setattr("fedloom.models.layers.fused_relu.can_use_fused_relu", lambda _: True)
    norm, x, seen = BatchNorm2d(4), maps(2, 4, 3, 3).cpu(), list[Tensor]()
    other = torch.ones(2, 4, 3, 3).double() if beside == "float64" else beside and torch.randn(beside)
    if hook:
        norm.register_forward_hook(lambda *given: seen.append(given[2]))
    y = norm.relu(x, other)
    expected = F.batch_norm(x, None, None, training=True)
    expected = F.relu(expected if other is None else expected + other)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert len(seen) == hook
    fused = not hook and beside in (None, (2, 4, 3, 3))
    assert (type(y.grad_fn).__name__ == "_BatchNormReLUFunctionBackward") is fused


def test_statistics_that_are_not_tracked_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_load_norm_kernels", step_by_step)
    monkeypatch.setattr("fedloom.models.layers.fused_relu.can_use_fused_relu", lambda _: True)
    norm = BatchNorm2d(3)
    norm.track_running_stats = False
    norm((torch.randn(4, 3, 2, 2) + 5).contiguous(memory_format=torch.channels_last))
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("fusing_on_a_gpu")
class TestOnAGpu:
    @pytest.mark.parametrize("added", [False, True])
    @pytest.mark.parametrize("size", [(50, 16, 32, 32), (50, 64, 32, 32), (7, 512, 4, 4)])
    def test_bf16(self, kernels: Any, size: tuple[int, int, int, int], added: bool) -> None:
        check(kernels, size, True, added, 0, torch.bfloat16, 0.02)

    @pytest.mark.parametrize("precision", ["fp32", "tf32"])
    def test_only_where_rounding_may_differ(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedloom.devices.precision._to_the_bit", precision == "fp32")
        norm, x = BatchNorm2d(16).cuda(), maps(8, 16, 8, 8)
        assert (norm.relu(x).grad_fn.name() == "_BatchNormReLUFunctionBackward") is (precision == "tf32")  # type: ignore[union-attr]
        assert norm.relu(x.contiguous()).grad_fn.name() == "ReluBackward0"  # type: ignore[union-attr]
        assert norm.eval().relu(x).grad_fn.name() == "ReluBackward0"  # type: ignore[union-attr]

    @pytest.mark.parametrize("model", ["resnet20", "vgg16", "resnet20-bottleneck"])
    def test_networks_go_where_they_went(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first step's gradient is that of torch's layers: to rounding, which norms and ReLUs let grow."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        torch.manual_seed(0)
        module, x = build_model(model, (3, 32, 32), 10, 0).cuda(), maps(50, 3, 32, 32)
        y, found = torch.arange(50, device="cuda") % 10, []
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        for fused in (True, False):
            monkeypatch.setattr(BatchNorm2d, "_may_fuse", BatchNorm2d._may_fuse if fused else lambda *_: False)
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
            found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
        assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.02

    def test_an_ensemble_by_vmap(self) -> None:
        """Transforms do not know the order of what they stand for."""
        module, x = build_model("resnet20", (3, 32, 32), 10).cuda().eval(), maps(4, 3, 32, 32)
        weights = {name: torch.stack([tensor, tensor]) for name, tensor in module.state_dict().items()}
        with torch.backends.cudnn.flags(enabled=False):  # type: ignore[no-untyped-call]  # cuDNN's own norm cannot do it
            found = torch.func.vmap(lambda one: torch.func.functional_call(module, one, x))(weights)
        torch.testing.assert_close(found[0], module(x), rtol=1e-3, atol=1e-3)
