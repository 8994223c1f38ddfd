"""Tests of residual networks: shortcuts, stems, norms, weights of other tools."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.rng import RngStreams
from fedloom.errors import InputError
from fedloom.models import build_model, count_parameters
from fedloom.models.initial_weights import InitialWeightsFile, load_initial_weights
from fedloom.models.resnet import BasicBlock, PaddedShortcut, PreActBottleneck, ResNet


def resnet(name: str, shape: tuple[int, ...], classes: int = 4) -> ResNet:
    torch.manual_seed(0)
    module = build_model(name, shape, classes)
    assert isinstance(module, ResNet)
    return module.eval()


def test_shortcut_a_takes_every_other_pixel_and_adds_zeros() -> None:
    x = torch.arange(2 * 2 * 3 * 3.0).view(2, 2, 3, 3)
    out = PaddedShortcut(3, 2)(x)
    assert out.shape == (2, 5, 2, 2)
    assert torch.equal(out[:, :2], x[:, :, [0, 2]][:, :, :, [0, 2]])
    assert not out[:, 2:].any()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [7, 8])
def test_shortcut_a_keeps_the_order_of_maps_there_and_back(side: int, order: torch.memory_format) -> None:
    x = torch.randn(2, 3, side, side).contiguous(memory_format=order).requires_grad_()
    y = PaddedShortcut(4, 2)(x * 1)
    (by_slice,) = torch.autograd.grad(F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 4)), x, torch.ones_like(y))
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, by_slice)
    assert y.is_contiguous(memory_format=order)
    assert gradient.is_contiguous(memory_format=order)


def test_shortcuts_of_resnet20() -> None:
    kinds = {}
    for option in "AB":
        module = resnet(f"resnet20:shortcut={option}", (3, 32, 32))
        blocks = [part for part in module.modules() if isinstance(part, BasicBlock)]
        assert len(blocks) == 9
        kinds[option] = [type(block.shortcut) for block in blocks]
    same = [nn.Identity] * 2
    assert kinds["A"] == [nn.Identity, *same, PaddedShortcut, *same, PaddedShortcut, *same]
    assert kinds["B"] == [nn.Identity, *same, nn.Sequential, *same, nn.Sequential, *same]


def test_a_block_is_what_the_paper_says() -> None:
    module = resnet("resnet20:shortcut=B,width=4", (3, 8, 8))
    block = module.get_submodule("body.layer2.0")
    assert isinstance(block, BasicBlock)
    x = torch.randn(2, 4, 8, 8)
    inner = block.norm2(block.conv2(F.relu(block.norm1(block.conv1(x)))))
    assert torch.equal(block(x), F.relu(inner + block.shortcut(x)))
    assert block(x).shape == (2, 8, 4, 4)


def test_stems() -> None:
    x = torch.randn(2, 3, 32, 32)
    sizes = {}
    for stem in ("cifar", "imagenet"):
        module = resnet(f"resnet18:stem={stem},width=4", (3, 32, 32))
        seen: list[Tensor] = []
        module.body.register_forward_hook(lambda _, given, __, seen=seen: seen.append(given[0]))
        module(x)
        sizes[stem] = tuple(seen[0].shape)
        usual = F.relu(module.norm1(module.conv1(x)))  # the paper's order: ReLU, then the pool
        assert torch.equal(seen[0], module.pool(usual))
    assert sizes == {"cifar": (2, 4, 32, 32), "imagenet": (2, 4, 8, 8)}


def test_resnet50_strides_in_its_3_by_3_convolutions() -> None:
    module = resnet("resnet50:width=4", (3, 32, 32))
    strided = [n for n, m in module.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert strided == ["conv1"] + [f"body.layer{i}.0.{part}" for i in (2, 3, 4) for part in ("conv2", "shortcut.conv")]


def test_checkpoints_of_torchvision_and_timm_are_a_start() -> None:
    """Their names: bn1 for norm1, downsample.0 and .1 for the shortcut's parts, fc for the head."""
    ours = resnet("resnet18:stem=imagenet,width=4", (3, 32, 32), 1000)
    theirs = {}
    for name, tensor in resnet("resnet18:stem=imagenet,width=4", (3, 32, 32), 1000).state_dict().items():
        name = name.removeprefix("body.").replace("norm1", "bn1").replace("norm2", "bn2").replace("head", "fc")
        name = name.replace("shortcut.conv", "downsample.0").replace("shortcut.norm", "downsample.1")
        theirs[name] = torch.rand_like(tensor) if tensor.is_floating_point() else tensor
    assert {"bn1.running_var", "layer2.0.downsample.1.weight", "layer4.1.bn2.bias", "fc.weight"} <= theirs.keys()
    begun = load_initial_weights(
        ours, InitialWeightsFile(path=Path("theirs"), sha256="", tensors=theirs, metadata={}), RngStreams(0)
    )
    assert (begun.missing, begun.unexpected, begun.replaced) == ((), (), ())
    assert torch.equal(
        ours.state_dict()["body.layer3.0.shortcut.norm.running_mean"], theirs["layer3.0.downsample.1.running_mean"]
    )
    assert torch.equal(ours.head.weight, theirs["fc.weight"])


def test_the_bottleneck_net_of_the_authors_code() -> None:
    torch.manual_seed(0)
    module = build_model("resnet20-bottleneck", (3, 32, 32), 10)
    assert len(module.state_dict()) == 119, "as many entries as in that code"
    blocks = [part for part in module.modules() if isinstance(part, PreActBottleneck)]
    assert [type(block.shortcut) for block in blocks] == [nn.Conv2d, nn.Identity] * 3
    assert all((norm.weight == 0.5).all() for norm in module.modules() if isinstance(norm, nn.BatchNorm2d))
    for conv in (part for part in module.modules() if isinstance(part, nn.Conv2d)):
        spread = (2 / (conv.kernel_size[0] ** 2 * conv.out_channels)) ** 0.5  # by what leaves it, not what enters
        assert float(conv.weight.detach().std()) == pytest.approx(spread, rel=5 / conv.weight.numel() ** 0.5)
    out = module(torch.randn(4, 3, 32, 32))
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(out.sum(), list(named.values()), allow_unused=True)
    unused = [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]
    assert unused == ["norm.weight", "norm.bias"], "the norm at the end is made and not used"


def test_norms_come_first_in_the_bottleneck_net() -> None:
    block = build_model("resnet20-bottleneck", (3, 8, 8), 10).eval().get_submodule("body.layer2.0")
    assert isinstance(block, PreActBottleneck)
    x = torch.randn(2, 64, 8, 8)
    inner = block.conv1(F.relu(block.norm1(x)))
    inner = block.conv3(F.relu(block.norm3(block.conv2(F.relu(block.norm2(inner))))))
    assert torch.equal(block(x), inner + block.shortcut(x))
    assert block(x).shape == (2, 128, 4, 4)


def test_grey_images_pass_a_maximum_in_the_bottleneck_net() -> None:
    pools = [build_model("resnet20-bottleneck", (c, 8, 8), 10).get_submodule("pool") for c in (1, 3)]
    assert [type(pool) for pool in pools] == [nn.MaxPool2d, nn.Identity]
    assert pools[0](torch.zeros(1, 2, 8, 8)).shape == (1, 2, 8, 8)


@pytest.mark.parametrize("name", ["resnet18:width=4,stem=imagenet", "resnet50:width=4"])
def test_grey_images_are_repeated_for_weights_from_colour_ones(name: str) -> None:
    grey, colour = build_model(f"{name},color=true", (1, 16, 16), 5).eval(), build_model(name, (3, 16, 16), 5).eval()
    grey.load_state_dict(colour.state_dict())
    x = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(grey(x), colour(x.repeat(1, 3, 1, 1)), rtol=0, atol=0)
    assert count_parameters(f"{name},color=true", (1, 16, 16), 5) == count_parameters(name, (3, 16, 16), 5)
    assert count_parameters(f"{name},color=true", (3, 16, 16), 5) == count_parameters(name, (3, 16, 16), 5)
    with pytest.raises(InputError, match="cannot take images of 2 channels; it takes 1 or 3"):
        build_model(f"{name},color=true", (2, 16, 16), 5)
