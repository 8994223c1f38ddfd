"""Tests of VGG-16: stages, classifiers, small images."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.models import build_model
from fedloom.models.vgg import _AdaptivePool7x7


def layers(name: str, side: int = 32) -> list[nn.Module]:
    with torch.device("meta"):
        module = build_model(name, (3, side, side), 10)
    assert isinstance(module, nn.Sequential)
    return list(module)


def test_the_stages() -> None:
    found = layers("vgg16")
    plan = [
        "pool" if isinstance(x, nn.MaxPool2d) else x.out_channels
        for x in found
        if isinstance(x, nn.MaxPool2d | nn.Conv2d)
    ]
    deep = [512, 512, 512, "pool"]
    assert plan == [64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", *deep, *deep]


@pytest.mark.parametrize(
    ("classifier", "sizes", "dropped"),
    [
        ("linear", [(512, 10)], 0),
        ("512", [(512, 512), (512, 512), (512, 10)], 2),
        ("4096", [(512, 4096), (4096, 4096), (4096, 10)], 2),
        ("7x7", [(25088, 4096), (4096, 4096), (4096, 10)], 2),
    ],
)
def test_the_classifiers(classifier: str, sizes: list[tuple[int, int]], dropped: int) -> None:
    found = layers(f"vgg16:classifier={classifier}")
    assert [(x.in_features, x.out_features) for x in found if isinstance(x, nn.Linear)] == sizes
    assert [x.p for x in found if isinstance(x, nn.Dropout)] == [0.5] * dropped
    assert not any(isinstance(x, nn.Dropout) for x in layers(f"vgg16:classifier={classifier},dropout=0"))


@pytest.mark.parametrize(("side", "pools"), [(64, 5), (32, 5), (28, 4), (8, 3), (1, 0)])
def test_a_pool_is_left_out_where_nothing_is_left_to_halve(side: int, pools: int) -> None:
    assert sum(isinstance(x, nn.MaxPool2d) for x in layers("vgg16", side)) == pools


@pytest.mark.parametrize("side", [1, 2, 7, 9])
def test_spreading_is_the_adaptive_mean(side: int) -> None:
    x = torch.randn(2, 3, side, side)
    torch.testing.assert_close(_AdaptivePool7x7()(x), F.adaptive_avg_pool2d(x, 7))


def test_without_norms_something_of_the_images_arrives_at_the_end() -> None:
    """With torch's usual weights all images would look alike (3e-7), and nothing could be learned."""
    torch.manual_seed(0)
    module = build_model("vgg16:norm=none,classifier=linear,width=16", (3, 32, 32), 10)
    assert module(torch.randn(16, 3, 32, 32)).std(0).mean() > 1e-3
