"""Tests of norm layers: what each normalizes over, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from fedloom.models import build_model
from fedloom.models.layers.norms import BatchNorm2d, StatelessBatchNorm2d

NORMED = ["cnn", "convnet", "resnet20", "resnet20-bottleneck", "resnet18", "resnet50", "vgg16"]
KINDS = {"batch": BatchNorm2d, "batch-stateless": StatelessBatchNorm2d, "group": nn.GroupNorm}
KINDS |= {"instance": nn.GroupNorm, "none": nn.Identity}


def norms(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm2d | nn.GroupNorm)]


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("name", NORMED)
def test_every_norm_of_a_network_is_of_the_chosen_kind(name: str, norm: str) -> None:
    with torch.device("meta"):
        usual = build_model(f"{name}:norm=batch", (3, 40, 40), 4)
        module = build_model(f"{name}:norm={norm}", (3, 40, 40), 4)
    found = norms(module)
    assert {type(part) for part in found} == ({KINDS[norm]} if norm != "none" else set())
    assert len(found) == (0 if norm == "none" else len(norms(usual)))
    for part in found:
        if isinstance(part, nn.GroupNorm):
            assert part.num_groups == (2 if norm == "group" else part.num_channels)
    # Only batch norm's statistics are buffers: they alone would have to be averaged.
    buffers = {
        entry.name.rpartition(".")[2] for entry in Layout.of(module).entries if entry.kind is not TensorKind.PARAMETER
    }
    assert buffers == ({"running_mean", "running_var", "num_batches_tracked"} if norm == "batch" else set())


@pytest.mark.parametrize("name", ["resnet20", "resnet20-bottleneck", "resnet18", "resnet50"])
def test_without_norms_convolutions_have_biases(name: str) -> None:
    with torch.device("meta"):
        biases = [
            {
                part.bias is not None
                for part in build_model(f"{name}:norm={norm}", (3, 8, 8), 4).modules()
                if isinstance(part, nn.Conv2d)
            }
            for norm in ("none", "group")
        ]
    assert biases == [{True}, {False}]


def test_group_norm_takes_the_groups_it_is_given() -> None:
    module = build_model("resnet18:norm=group,groups=4,width=8", (3, 16, 16), 4)
    assert {part.num_groups for part in norms(module) if isinstance(part, nn.GroupNorm)} == {4}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet18:norm=group,groups=3", (3, 16, 16), "cannot share 64 channels among 3 groups"),
        ("resnet18:groups=4", (3, 16, 16), "groups is for norm=group, and norm is 'batch'"),
        ("resnet18:norm=instance", (3, 8, 8), "8 x 8 pixels shrink to one.*another norm"),
        ("resnet18:norm=instance,stem=imagenet", (3, 32, 32), "32 x 32 pixels shrink to one"),
        ("resnet20:norm=group,groups=16", (3, 1, 1), "1 x 1 pixels shrink to one"),
        ("vgg16:norm=instance", (3, 28, 28), "28 x 28 pixels shrink to one"),
    ],
)
def test_norms_that_cannot_be(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(name, shape, 4)


@pytest.mark.parametrize(("name", "side"), [("resnet18", 9), ("resnet18:stem=imagenet", 33), ("vgg16", 32)])
def test_instance_norm_leaves_something_of_images_that_are_large_enough(name: str, side: int) -> None:
    torch.manual_seed(0)
    module = build_model(f"{name}{',' if ':' in name else ':'}norm=instance,width=4", (1, side, side), 4).eval()
    out = module(torch.randn(3, 1, side, side))
    assert (out[0] - out[1]).abs().max() > 1e-5


def by_definition(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_stateless_batch_norm_is_the_definition_for_every_batch(
    samples: int, channels: int, height: int, width: int, training: bool, channels_last: bool
) -> None:
    """Also for one sample of 1 x 1 pixel, which torch's refuses; values and gradients."""
    torch.manual_seed(samples)
    norm = StatelessBatchNorm2d(channels).double().train(training)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(samples, channels, height, width, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
    ours, theirs = norm(x), by_definition(norm, x)
    torch.testing.assert_close(ours, theirs)
    wanted = (x, norm.weight, norm.bias)
    pairs = zip(*(torch.autograd.grad(out.sin().sum(), wanted) for out in (ours, theirs)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


def test_a_lone_value_is_treated_like_a_batch_of_its_copies() -> None:
    torch.manual_seed(0)
    norm = StatelessBatchNorm2d(5).double()
    nn.init.normal_(norm.bias)
    x = torch.randn(1, 5, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(norm(x), norm(x.expand(4, 5, 1, 1).contiguous())[:1])
    with pytest.raises(ValueError, match="more than 1 value"):
        nn.BatchNorm2d(5, track_running_stats=False).double()(x)


def test_stateless_batch_norm_tests_by_the_batch_at_hand() -> None:
    torch.manual_seed(0)
    module = build_model("resnet18:norm=batch-stateless,width=4", (3, 8, 8), 4)
    x = torch.randn(6, 3, 8, 8)
    assert torch.equal(module.eval()(x), module.train()(x))
    assert not torch.allclose(module(x[:3]), module(x)[:3])
