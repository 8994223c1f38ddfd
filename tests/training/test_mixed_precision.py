"""Tests of networks that train in another precision.

Tests use float64, which every CPU supports; a GPU uses bf16.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models import build_model
from fedloom.training.mixed_precision import _cast_parameters, apply_mixed_precision


def tied() -> nn.Module:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    module[0].weight.requires_grad_(False)
    return module


def channels_last() -> nn.Module:
    return build_model("lenet", (3, 32, 32), 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: build_model("lenet", (1, 28, 28), 10), (4, 1, 28, 28)),
    "channels last": (channels_last, (4, 3, 32, 32)),
    "tied": (tied, (4, 8)),
    "partly frozen": (partly_frozen, (4, 8)),
}


def gradients(module: nn.Module, output: Tensor) -> list[Tensor]:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(output.square().sum(), weights))


@pytest.mark.parametrize("name", NETWORKS)
def test_it_computes_what_the_network_in_that_type_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape, dtype=torch.float64)
    for weight in module.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.double()  # what is frozen is left to autocast
    twin = copy.deepcopy(module).double()
    with _cast_parameters(module, torch.float64):
        output = module(x)
    assert torch.equal(output, twin(x))
    ours, theirs = gradients(module, output), gradients(twin, twin(x))
    for got, wanted, weight in zip(ours, theirs, (w for w in module.parameters() if w.requires_grad), strict=True):
        assert got.dtype is torch.float32
        assert got.shape == weight.shape
        torch.testing.assert_close(got, wanted.float(), rtol=1e-6, atol=1e-7)


def test_weights_are_themselves_again_afterwards_also_when_the_network_fails() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = dict(module.named_parameters())
    inside: dict[str, Any] = {}

    def fail() -> None:
        with _cast_parameters(module, torch.float64):
            inside.update((name, value.dtype) for name, value in module.named_parameters(remove_duplicate=False))
            inside["0.weight"], inside["0.bias"] = module[0].weight.dtype, module[0].bias.dtype
            raise RuntimeError("no way")

    with pytest.raises(RuntimeError, match="no way"):
        fail()
    usual = dict.fromkeys(("1.weight", "1.bias"), torch.float32)  # norms compute in the usual type
    assert inside == {"0.weight": torch.float64, "0.bias": torch.float64, **usual}
    after = dict(module.named_parameters())
    assert all(after[name] is weight for name, weight in before.items())


def test_a_network_without_such_layers_is_left_alone() -> None:
    module = nn.BatchNorm1d(3)
    with _cast_parameters(module, torch.float64):
        assert module.weight.dtype is torch.float32


def test_only_training_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    module = apply_mixed_precision(nn.Linear(3, 2), torch.device("cpu"), torch.float64)
    x = torch.ones(1, 3, dtype=torch.float64)
    assert module(x).dtype is torch.float32, "the output has the usual type"
    module.eval()
    with pytest.raises(RuntimeError, match="dtype"):
        module(x)


def test_a_copy_of_a_network_in_a_lower_type_computes_with_its_own_weights() -> None:
    module = apply_mixed_precision(nn.Linear(3, 2), torch.device("cpu"), torch.bfloat16)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()  # type: ignore[union-attr, operator]
        other.bias.fill_(0.5)  # type: ignore[union-attr, operator]
    x = torch.ones(1, 3)
    assert other(x).tolist() == [[0.5, 0.5]]
    assert module(x).tolist() != [[0.5, 0.5]]
    assert other(x).dtype is torch.float32
    module.eval()
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))  # type: ignore[arg-type]
    assert other.training


class Telling(nn.Module):
    """Tells what it is asked for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, *, inside: bool = False) -> Any:
        made = self.inner(x)
        y = self.outer(made.relu())
        return {"output": y, "inside": [made, len(x)], "classes": y.argmax(1)} if inside else y


@pytest.mark.parametrize("training", [True, False])
def test_several_outputs_have_the_usual_type_too(training: bool) -> None:
    module = apply_mixed_precision(Telling(), torch.device("cpu"), torch.bfloat16).train(training)
    found = module(torch.randn(4, 8), inside=True)
    assert found["output"].dtype is found["inside"][0].dtype is torch.float32
    assert found["inside"][1] == 4
    assert found["classes"].dtype is torch.int64
