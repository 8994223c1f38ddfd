"""The networks: their published sizes, the shapes they take, and that memory layout does not matter."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.errors import InputError
from fedloom.models import build, catalogue, vit

POOLED_BY_MAXIMUM = ["lenet", "cnn", "cnn-valid"]
CONVOLUTIONAL = [*POOLED_BY_MAXIMUM, "convnet"]
NAMES = ["logreg", "mlp", "mlp-128", *CONVOLUTIONAL]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("logreg", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 199_210),
        ("lenet", (3, 32, 32), 10, 62_006),
        ("lenet", (3, 32, 32), 20, 62_856),
        ("cnn", (1, 28, 28), 10, 1_663_370),
        ("cnn", (1, 28, 28), 62, 1_690_046),
        ("cnn", (3, 32, 32), 10, 2_156_490),
        ("cnn", (3, 32, 32), 20, 2_161_620),
        ("cnn", (3, 32, 32), 100, 2_202_660),
        ("cnn-valid", (1, 28, 28), 10, 582_026),
        ("cnn-valid", (1, 28, 28), 62, 608_702),
        ("cnn-valid", (3, 32, 32), 10, 878_538),
        ("cnn-valid", (3, 32, 32), 20, 883_668),
        ("cnn-valid", (3, 32, 32), 100, 924_708),
        ("convnet", (1, 28, 28), 10, 317_706),
        ("convnet", (3, 32, 32), 10, 320_010),
        ("convnet", (3, 32, 32), 100, 504_420),
        ("mlp-128", (1, 28, 28), 10, 118_282),
    ],
)
def test_published_parameter_counts(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    assert parameters(build(name, shape, classes)) == count


def test_catalogue_counts_without_touching_the_generator() -> None:
    before = torch.get_rng_state()
    infos = {info.name: info for info in catalogue()}
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name in infos if name not in vit.NETWORKS] == NAMES
    assert infos["cnn"].parameters_1x28x28 == 1_663_370
    assert infos["lenet"].parameters_3x32x32 == 62_006


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    channels=st.integers(1, 3),
    height=st.integers(16, 29),
    width=st.integers(16, 29),
    classes=st.integers(1, 12),
)
def test_any_large_enough_image_gives_one_score_a_class(
    name: str, channels: int, height: int, width: int, classes: int
) -> None:
    model = build(name, (channels, height, width), classes)
    assert model(torch.zeros(2, channels, height, width)).shape == (2, classes)


@pytest.mark.parametrize(("name", "smallest"), [("lenet", 16), ("cnn", 4), ("cnn-valid", 16), ("convnet", 8)])
def test_the_smallest_size_named_works_and_one_less_does_not(name: str, smallest: int) -> None:
    assert build(name, (1, smallest, smallest), 3)(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
    for sides in ((smallest - 1, 40), (40, smallest - 1)):
        with pytest.raises(InputError, match=f"smallest it takes have {smallest} x {smallest}"):
            build(name, (1, *sides), 3)


@pytest.mark.parametrize("name", ["logreg", "mlp", "mlp-128"])
def test_vectors_suit_dense_networks(name: str) -> None:
    assert build(name, (13,), 4)(torch.zeros(5, 13)).shape == (5, 4)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_vectors_do_not_suit_convolutions(name: str) -> None:
    with pytest.raises(InputError, match=r"shape \(13,\); it wants images"):
        build(name, (13,), 4)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "message"),
    [
        ("lennet", (1, 28, 28), 10, "did you mean 'lenet'"),
        ("mlp", (), 10, "shape \\(\\)"),
        ("mlp", (0,), 10, "shape \\(0,\\)"),
        ("mlp", (3,), 0, "0 classes"),
    ],
)
def test_impossible_requests(name: str, shape: tuple[int, ...], classes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(name, shape, classes)


@pytest.mark.parametrize("name", POOLED_BY_MAXIMUM)
def test_relu_after_the_pool_equals_relu_before_it(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (3, 20, 24), 5)
    assert isinstance(model, nn.Sequential)
    layers = list(model)
    swapped = []
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.MaxPool2d):
            assert isinstance(layers[i + 1], nn.ReLU)
            swapped += [layers[i + 1], layer]
        elif not (i and isinstance(layers[i - 1], nn.MaxPool2d)):
            swapped.append(layer)
    papers = nn.Sequential(*swapped)
    x = torch.randn(4, 3, 20, 24)
    ours, theirs = model(x), papers(x)
    assert torch.equal(ours, theirs)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_does_not_change_the_function(name: str) -> None:
    torch.manual_seed(0)
    model, x = build(name, (3, 18, 22), 7).double(), torch.randn(4, 3, 18, 22, dtype=torch.float64)
    plain = model(x)
    if name in CONVOLUTIONAL:
        model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_layer_is_the_head(name: str) -> None:
    model = build(name, (1, 16, 16), 7)
    assert list(dict(model.named_parameters()))[-2:] == ["head.weight", "head.bias"]
    assert model.get_submodule("head").out_features == 7


def test_logistic_regression_is_one_affine_map() -> None:
    model, x = build("logreg", (2, 3, 4), 5), torch.randn(6, 2, 3, 4)
    head = model.get_submodule("head")
    torch.testing.assert_close(model(x), x.reshape(6, prod((2, 3, 4))) @ head.weight.T + head.bias)


def test_the_convnet_normalises_each_channel_of_each_image_by_itself() -> None:
    """Neither the other images of a batch nor the mode of the module change what it computes."""
    torch.manual_seed(0)
    model, x = build("convnet", (1, 28, 28), 10), torch.randn(3, 1, 28, 28)
    assert not list(model.buffers())
    together = model(x)
    torch.testing.assert_close(model(x[1:2]), together[1:2], rtol=1e-4, atol=1e-5)
    assert torch.equal(model.eval()(x), together)
    norm = model.get_submodule("conv1_norm")
    planes = norm(model.get_submodule("conv1")(x))
    torch.testing.assert_close(planes.mean((2, 3)), torch.zeros(3, 128), rtol=0, atol=1e-5)
    assert planes.shape == (3, 128, 32, 32), "28 x 28 is padded to 32 x 32"
