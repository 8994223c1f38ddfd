"""Tests of the networks: published sizes, input shapes, memory layout."""

from copy import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.cli.catalog import read_catalog_entries
from fedloom.core.layout import Layout
from fedloom.errors import InputError
from fedloom.models import available_models, build_model, count_parameters, registry, vit
from fedloom.models.layers.pooling import PooledConv2d

DENSE = ["logreg", "mlp", "mlp-128"]
POOLED_BY_MAXIMUM = ["lenet", "lenet-femnist", "cnn", "cnn-valid", "cnn-leaf", "cnn-cifar", "vgg16:width=4,norm=group"]
RESIDUAL = ["resnet20:width=4", "resnet20:width=4,shortcut=B", "resnet20-bottleneck:width=4"]
RESIDUAL += ["resnet18:width=4", "resnet18:width=4,stem=imagenet", "resnet50:width=4"]
CONVOLUTIONAL = [*POOLED_BY_MAXIMUM, "convnet", *RESIDUAL]
NAMES = [*DENSE, *CONVOLUTIONAL]
TEXT = ["lstm-shakespeare:hidden=4", "lstm-sent140:hidden=4,embedding=3,vocabulary=20"]

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def test_no_network_is_forgotten() -> None:
    assert {name.partition(":")[0] for name in [*NAMES, *TEXT]} | set(vit.NETWORKS) == set(registry.NETWORKS)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("logreg", GREY, 10, 7_850),
        ("mlp", GREY, 10, 199_210),
        ("mlp-128", GREY, 10, 118_282),
        ("lenet", COLOUR, 10, 62_006),
        ("lenet", COLOUR, 20, 62_856),
        ("lenet-femnist", GREY, 62, 160_510),
        ("cnn", GREY, 10, 1_663_370),
        ("cnn", GREY, 62, 1_690_046),
        ("cnn", COLOUR, 10, 2_156_490),
        ("cnn", COLOUR, 20, 2_161_620),
        ("cnn", COLOUR, 100, 2_202_660),
        ("cnn-valid", GREY, 10, 582_026),
        ("cnn:padding=0", GREY, 62, 608_702),
        ("cnn-valid", COLOUR, 10, 878_538),
        ("cnn:padding=0", COLOUR, 20, 883_668),
        ("cnn-valid", COLOUR, 100, 924_708),
        ("cnn-leaf", GREY, 62, 6_603_710),
        ("cnn-cifar", (3, 24, 24), 10, 1_068_298),
        ("cnn-cifar:padding=0", COLOUR, 10, 797_962),
        ("convnet", GREY, 10, 317_706),
        ("convnet", COLOUR, 10, 320_010),
        ("convnet", COLOUR, 100, 504_420),
        ("resnet20", COLOUR, 10, 269_722),
        ("resnet20:shortcut=B", COLOUR, 10, 272_474),
        ("resnet20:shortcut=A", COLOUR, 100, 275_572),
        ("resnet20:shortcut=B", COLOUR, 100, 278_324),
        ("resnet20:shortcut=A", GREY, 62, 272_814),
        ("resnet20-bottleneck", COLOUR, 10, 219_482),
        ("resnet20-bottleneck", COLOUR, 20, 222_052),
        ("resnet20-bottleneck", GREY, 62, 232_558),
        ("resnet18", COLOUR, 10, 11_173_962),
        ("resnet18", COLOUR, 20, 11_179_092),
        ("resnet18", COLOUR, 100, 11_220_132),
        ("resnet18:norm=group", COLOUR, 10, 11_173_962),
        ("resnet18:norm=batch-stateless", COLOUR, 100, 11_220_132),
        ("resnet18:stem=imagenet", COLOUR, 10, 11_181_642),
        ("resnet18:stem=imagenet", (3, 224, 224), 1000, 11_689_512),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("resnet50", (3, 64, 64), 345, 24_214_937),
        ("vgg16:norm=none,classifier=linear", COLOUR, 10, 14_719_818),
        ("vgg16:norm=batch,classifier=linear", COLOUR, 10, 14_728_266),
        ("vgg16:norm=none,classifier=512", COLOUR, 10, 15_245_130),
        ("vgg16:norm=batch,classifier=512", COLOUR, 10, 15_253_578),
        ("vgg16:norm=none,classifier=4096", COLOUR, 10, 33_638_218),
        ("vgg16", COLOUR, 10, 33_646_666),
        ("vgg16:norm=none,classifier=7x7", COLOUR, 10, 134_301_514),
        ("vgg16:norm=batch,classifier=7x7", COLOUR, 10, 134_309_962),
        ("lstm-shakespeare", (80,), 80, 819_920),
        ("lstm-sent140:frozen=true", (25,), 2, 174_786),
        ("lstm-sent140", (25,), 2, 174_786 + 100 * 400_001),
        ("lstm-sent140:frozen=true,embedding=300,hidden=256,dense=0", (25,), 2, 1_097_728 + 2 * 256 + 2),
    ],
)
def test_published_parameter_counts(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert count_parameters(name, shape, classes) == expected


@pytest.mark.parametrize("name", NAMES)
def test_what_is_counted_is_what_is_built(name: str) -> None:
    module = build_model(name, (1, 16, 16), 7)
    assert (
        count_parameters(name, (1, 16, 16), 7)
        == sum(p.numel() for p in module.parameters())
        == Layout.of(module).trainable
    )


def test_catalogue_counts_without_touching_the_generator() -> None:
    before = torch.get_rng_state()
    infos = {info.name: info for info in available_models()}
    assert torch.equal(torch.get_rng_state(), before)
    assert list(infos) == list(registry.NETWORKS)
    assert infos["cnn"].parameters_1x28x28 == 1_663_370
    assert infos["lenet"].parameters_3x32x32 == 62_006
    assert infos["lstm-shakespeare"].parameters_text == 819_920
    assert infos["lstm-shakespeare"].parameters_3x32x32 is infos["cnn"].parameters_text is None


def test_options_are_listed_with_their_defaults() -> None:
    listed = {
        entry["name"]: {o["name"]: o["default"] for o in entry["options"]} for entry in read_catalog_entries("models")
    }
    assert listed["resnet20"] == {"norm": "batch", "groups": 2, "shortcut": "A", "width": 16}
    assert listed["resnet50"]["stem"] == "imagenet"
    assert listed["logreg"] == {}
    assert listed["vit-tiny-lora"].keys() == listed["vit-tiny"].keys() | {"rank", "alpha", "dropout"}
    assert all(option["help"] for entry in read_catalog_entries("models") for option in entry["options"])


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
    model = build_model(name, (channels, height, width), classes)
    assert model(torch.zeros(2, channels, height, width)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "smallest"), [("lenet", 16), ("cnn", 4), ("cnn:padding=1", 10), ("cnn-valid", 16), ("convnet", 8)]
)
def test_the_smallest_size_named_works_and_one_less_does_not(name: str, smallest: int) -> None:
    assert build_model(name, (1, smallest, smallest), 3)(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
    for sides in ((smallest - 1, 40), (40, smallest - 1)):
        with pytest.raises(InputError, match=f"needs at least {smallest} x {smallest}"):
            build_model(name, (1, *sides), 3)


@pytest.mark.parametrize("name", DENSE)
def test_vectors_suit_dense_networks(name: str) -> None:
    assert build_model(name, (13,), 4)(torch.zeros(5, 13)).shape == (5, 4)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_vectors_do_not_suit_convolutions(name: str) -> None:
    with pytest.raises(InputError, match=r"shape \(13,\); it expects images"):
        build_model(name, (13,), 4)


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
        build_model(name, shape, classes)


@pytest.mark.parametrize("name", [*RESIDUAL, "vgg16:width=4", "vgg16:width=4,classifier=7x7"])
@pytest.mark.parametrize("sides", [(1, 1), (3, 1), (5, 7), (28, 28)])
def test_deep_networks_take_images_of_any_size(name: str, sides: tuple[int, int]) -> None:
    assert build_model(name, (2, *sides), 3)(torch.randn(4, 2, *sides)).shape == (4, 3)


def apart(layer: nn.Module) -> list[nn.Module]:
    """A convolution and its pool as two layers, with the same weights."""
    if not isinstance(layer, PooledConv2d):
        return [layer]
    conv = copy(layer)
    conv.__class__ = nn.Conv2d  # the same without the pool
    return [conv, nn.MaxPool2d(2)]


@pytest.mark.parametrize("name", POOLED_BY_MAXIMUM)
def test_relu_after_the_pool_equals_relu_before_it(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, (3, 20, 24), 5).eval()  # no dropout
    assert isinstance(model, nn.Sequential)
    layers = [part for layer in model for part in apart(layer)]
    swapped = []
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.MaxPool2d):
            assert isinstance(layers[i + 1], nn.ReLU)
            swapped += [layers[i + 1], layer]
        elif not (i and isinstance(layers[i - 1], nn.MaxPool2d)):
            swapped.append(layer)
    papers = nn.Sequential(*swapped)
    assert [type(layer) for layer in papers] != [type(layer) for layer in layers]
    x = torch.randn(4, 3, 20, 24)
    ours, theirs = model(x), papers(x)
    assert torch.equal(ours, theirs)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_does_not_change_the_function(name: str) -> None:
    torch.manual_seed(0)
    model, x = build_model(name, (3, 18, 22), 7).double().eval(), torch.randn(4, 3, 18, 22, dtype=torch.float64)
    plain = model(x)
    if name in CONVOLUTIONAL:
        model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), plain)


@pytest.mark.parametrize("name", [*NAMES, *TEXT])
def test_the_last_layer_is_the_head(name: str) -> None:
    model = build_model(name, (16,) if name in TEXT else (1, 16, 16), 7)
    assert list(dict(model.named_parameters()))[-2:] == ["head.weight", "head.bias"]
    assert model.get_submodule("head").out_features == 7


@pytest.mark.parametrize("name", [*NAMES, *TEXT])
def test_a_layer_is_a_leaf_module(name: str) -> None:
    """What FedMR swaps: never a whole block, and a norm's statistics with its weights."""
    model = build_model(name, (16,) if name in TEXT else (1, 16, 16), 7)
    owners = set(Layout.of(model).layer_columns())
    assert owners == {path for path, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert not any(list(model.get_submodule(owner).children()) for owner in owners)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18:norm=grup", "norm must be batch, batch-stateless, .* or none, not 'grup'; did you mean 'group'"),
        ("resnet20:shortcut=a", "shortcut must be A or B, not 'a'; did you mean 'A'"),
        ("resnet20:shortcut=C", "shortcut must be A or B, not 'C'\\.$"),
        ("vgg16:clasifier=512", "unknown option of vgg16 'clasifier'; did you mean 'classifier'"),
        ("vgg16:dropout=1", "model 'vgg16': dropout must be less than 1, not '1'"),
        ("cnn:padding=two", "padding must be a whole number, not 'two'"),
        ("resnet18:norm=batch,norm=none", "norm is given twice, as 'batch' and as 'none'"),
        ("resnet18:", "are given as resnet18:NAME=VALUE"),
        ("resnet18:norm", "are given as resnet18:NAME=VALUE"),
        ("mlp:", "'mlp' has no options"),
        ("resnet81:norm=group", "did you mean 'resnet18'"),
    ],
)
def test_wrong_options(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(name, (3, 32, 32), 10)


def test_logistic_regression_is_one_affine_map() -> None:
    model, x = build_model("logreg", (2, 3, 4), 5), torch.randn(6, 2, 3, 4)
    head = model.get_submodule("head")
    torch.testing.assert_close(model(x), x.reshape(6, prod((2, 3, 4))) @ head.weight.T + head.bias)


def test_the_convnet_normalises_each_channel_of_each_image_by_itself() -> None:
    """Neither the other images of a batch nor the mode of the module change what it computes."""
    torch.manual_seed(0)
    model, x = build_model("convnet", (1, 28, 28), 10), torch.randn(3, 1, 28, 28)
    assert not list(model.buffers())
    together = model(x)
    torch.testing.assert_close(model(x[1:2]), together[1:2], rtol=1e-4, atol=1e-5)
    assert torch.equal(model.eval()(x), together)
    norm = model.get_submodule("conv1_norm")
    planes = norm(model.get_submodule("conv1")(x))
    torch.testing.assert_close(planes.mean((2, 3)), torch.zeros(3, 128), rtol=0, atol=1e-5)
    assert planes.shape == (3, 128, 32, 32), "28 x 28 is padded to 32 x 32"


def written_out(name: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the papers' networks compute, with ReLU before the pool as they have it."""
    t = dict(module.named_parameters())

    def linear(layer: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, t[f"{layer}.weight"], t[f"{layer}.bias"])

    for i in (1, 2, 3) if name == "convnet" else (1, 2) if name != "mlp" else ():
        weight, bias = t[f"conv{i}.weight"], t[f"conv{i}.bias"]
        if name == "convnet":
            x = F.conv2d(x, weight, bias, padding=3 if i == 1 else 1)
            x = F.relu(F.instance_norm(x, weight=t[f"conv{i}_norm.weight"], bias=t[f"conv{i}_norm.bias"]))
            x = F.avg_pool2d(x, 2)
        else:
            x = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=2 if name == "cnn" else 0)), 2)
    x = x.flatten(1)
    for layer in {"lenet": ["fc1", "fc2"], "cnn": ["fc1"], "mlp": ["fc1", "fc2"], "convnet": []}[name]:
        x = F.relu(linear(layer, x))
    return linear("head", x)


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "convnet"])
def test_networks_compute_what_the_papers_write(name: str) -> None:
    torch.manual_seed(0)
    module, x = build_model(name, GREY, 10), torch.randn(3, *GREY)
    with torch.no_grad():
        for parameter in module.parameters():  # norms that are more than the identity
            parameter.add_(0.05 * torch.randn_like(parameter))
    torch.testing.assert_close(module(x), written_out(name, module, x), rtol=1e-4, atol=1e-5)
