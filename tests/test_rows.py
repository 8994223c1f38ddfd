"""Rows: what a layout holds, that binding copies nothing and loses no bit, and the mean of rows."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.rows import Kind, Layout, Mean, digest


class Odd(nn.Module):
    """A bit of everything: scalars, buffers of several kinds, a frozen weight, an empty module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Identity()
        self.body = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([-7, 9, 11], dtype=torch.int32))
        self.register_buffer("byte", torch.tensor(200, dtype=torch.uint8))
        self.register_buffer("void", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 3.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)) * self.scale + self.cache.sum()


class Tied(nn.Module):
    """One Parameter under two names, and one submodule (with buffers) under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4, bias=False)
        self.outof = nn.Linear(4, 4)
        self.outof.weight = self.into.weight
        self.first = nn.BatchNorm1d(4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.outof(self.first(self.into(x))))


def randomise(module: nn.Module, seed: int) -> None:
    """Other values in every tensor, frozen and non-persistent ones included."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in {id(t): t for t in [*module.parameters(), *module.buffers()]}.values():
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
        else:
            tensor.data.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and digest(a.reshape(-1)) == digest(b.reshape(-1))


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """A random chain of layers of all kinds, sometimes frozen, tied, nested or in float64."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 5))):
        width = draw(st.integers(1, 5))
        kind = draw(st.integers(0, 7))
        layer: nn.Module
        if kind == 0:
            layer = nn.Conv2d(width, draw(st.integers(1, 3)), (3, 2), bias=draw(st.booleans()))
        elif kind == 1:
            layer = nn.BatchNorm2d(width, affine=draw(st.booleans()))
        elif kind == 2:
            layer = nn.Sequential(nn.ReLU(), nn.Sequential(), nn.Linear(width, 2))
        elif kind == 3 and layers:
            layer = layers[draw(st.integers(0, len(layers) - 1))]
        elif kind == 4:
            layer = Odd()
        elif kind == 5:
            layer = nn.LSTM(width, 2)
        elif kind == 6:
            layer = Tied()
        else:
            layer = nn.Linear(width, 3)
        if draw(st.integers(0, 4)) == 0:
            layer.requires_grad_(False)
        layers.append(layer)
    module = nn.Sequential(nn.Linear(1, 1), *layers)
    return module.double() if draw(st.booleans()) else module


# layouts


def test_layout_holds_every_kind_in_its_block() -> None:
    module = Odd()
    layout = Layout.of(module)
    by_kind = {kind: [e.name for e in layout.entries if e.kind is kind] for kind in Kind}
    assert by_kind[Kind.PARAMETER] == ["scale", "body.weight", "body.bias", "norm.weight", "norm.bias"]
    assert by_kind[Kind.BUFFER] == ["norm.running_mean", "norm.running_var"]
    assert sorted(by_kind[Kind.INTEGER]) == ["byte", "mask", "norm.num_batches_tracked", "small", "void"]
    assert layout.frozen == ("frozen",)
    assert layout.trainable == 1 + 15 + 5 + 5 + 5
    assert layout.floats == layout.trainable + 10
    assert layout.size * 4 == layout.nbytes
    assert layout.size % 2 == 0, "rows stacked without a gap must keep 64-bit integers aligned"


@given(networks())
@settings(deadline=None, max_examples=40)
def test_entries_do_not_overlap_and_fill_the_row_in_order(module: nn.Module) -> None:
    layout = Layout.of(module)
    end = 0
    for entry in layout.entries:
        gap = entry.columns.start - end
        assert 0 <= gap < 2
        assert gap == 0 or entry.kind is Kind.INTEGER
        assert 0 <= entry.gap < 4
        assert entry.gap == 0 or entry.kind is Kind.BUFFER
        assert entry.kind is not Kind.BUFFER or entry.size % 4 or entry.offset % 4 == 0
        end = entry.columns.stop
    assert layout.size == max(end, layout.floats)
    assert 0 < layout.trainable <= layout.floats <= layout.size


@given(networks(), st.integers(0, 2**31), st.booleans())
@settings(deadline=None, max_examples=60)
def test_read_bind_read_round_trip_is_bit_exact(module: nn.Module, seed: int, channels_last: bool) -> None:
    layout = Layout.of(module, channels_last=channels_last)
    randomise(module, seed)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    row = layout.read(module)
    twin = deepcopy(module)
    randomise(twin, seed + 1)
    frozen = {name: twin.state_dict()[name].clone() for name in layout.frozen}
    layout.bind(twin, row)
    assert same_bits(layout.read(twin), row)
    after = twin.state_dict()
    for name, tensor in before.items():
        assert same_bits(after[name], frozen.get(name, tensor))
    assert Layout.of(twin, channels_last=channels_last).describe() == layout.describe(), "a bound module lays out alike"


def test_tied_weights_are_in_the_row_once_and_stay_tied() -> None:
    module = Tied()
    layout = Layout.of(module)
    names = {entry.names for entry in layout.entries}
    assert ("into.weight", "outof.weight") in names
    assert ("first.running_mean", "second.running_mean") in names
    assert ("first.weight", "second.weight") in names
    assert layout.trainable == 16 + 4 + 4 + 4
    row = layout.read(module)
    layout.bind(module, row)
    assert module.into.weight is module.outof.weight
    module.first.running_mean.fill_(5)
    assert torch.equal(module.second.running_mean, torch.full((4,), 5.0))
    module(torch.randn(6, 4))
    assert int(module.first.num_batches_tracked) == 2
    assert layout.state_dict(row)["second.num_batches_tracked"] == 2


def test_one_buffer_under_two_names_stays_one() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    module[1].running_mean = module[0].running_mean
    layout = Layout.of(module)
    row = layout.read(module)
    layout.bind(module, row)
    row[layout.trainable : layout.floats] = 4.0
    assert module[0].running_mean.data_ptr() == module[1].running_mean.data_ptr()
    assert bool((module[1].running_mean == 4).all())


def test_binding_leaves_frozen_and_non_persistent_tensors_alone() -> None:
    module = Odd()
    frozen, cache = module.frozen, module.cache
    pointers = frozen.data_ptr(), cache.data_ptr()
    layout = Layout.of(module)
    layout.bind(module, torch.zeros(layout.size))
    assert module.frozen is frozen
    assert module.cache is cache
    assert (frozen.data_ptr(), cache.data_ptr()) == pointers
    assert torch.equal(cache, torch.full((2,), 3.0))
    assert not module.frozen.requires_grad
    assert module.body.weight.requires_grad


def test_float64_models_have_float64_rows() -> None:
    layout = Layout.of(Odd().double())
    assert layout.dtype is torch.float64
    assert layout.empty().dtype is torch.float64
    assert layout.nbytes == layout.size * 8


def test_mixed_and_half_dtypes_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(InputError, match=r"0\.bias is float32, 1\.bias is float64|0\.weight is float32"):
        Layout.of(mixed)
    with pytest.raises(InputError, match="float16"):
        Layout.of(nn.Linear(2, 2).half())
    with pytest.raises(InputError, match="bfloat16"):
        Layout.of(nn.Linear(2, 2).bfloat16())
    with_half_buffer = nn.Linear(2, 2)
    with_half_buffer.register_buffer("h", torch.zeros(2, dtype=torch.float16))
    with pytest.raises(InputError, match="h is float16"):
        Layout.of(with_half_buffer)


def test_complex_tensors_are_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(InputError, match="phase is complex64"):
        Layout.of(module)


def only_an_empty_parameter() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(0, 3))
    return module


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False), only_an_empty_parameter()])
def test_models_without_a_trainable_number_are_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match="no trainable parameter"):
        Layout.of(module)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(InputError, match=r"0\.weight of the model has no shape yet"):
        Layout.of(nn.Sequential(nn.LazyLinear(3)))


def shared_parameter() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def buffer_over_a_weight() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("first", module.weight.data[0])
    return module


def buffer_inside_a_weight() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("second", module.weight.data[1])
    return module


@pytest.mark.parametrize("make", [shared_parameter, buffer_over_a_weight, buffer_inside_a_weight])
def test_two_tensors_over_one_memory_are_refused(make: type[nn.Module]) -> None:
    with pytest.raises(InputError, match="share memory"):
        Layout.of(make())


def test_tensors_side_by_side_in_one_memory_are_taken() -> None:
    memory = torch.randn(7)
    module = nn.Module()
    module.a, module.b = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
    assert Layout.of(module).size == 7


def test_units_are_the_modules_that_own_tensors() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False)))
    units = layout.units()
    assert list(units) == ["0", "2", "3"]
    assert [len(units[name]) for name in units] == [2, 5, 1]
    covered = torch.zeros(layout.size)
    for columns in units.values():
        for part in columns:
            covered[part] += 1
    assert covered.max() == 1
    assert covered.sum() == sum(e.size for e in layout.entries)


# binding


def test_bind_does_not_copy() -> None:
    module = Odd()
    layout = Layout.of(module)
    row = layout.read(module)
    layout.bind(module, row)
    start, end = row.data_ptr(), row.data_ptr() + row.nbytes
    for entry in layout.entries:
        tensor = dict(module.state_dict(keep_vars=True))[entry.name]
        assert tensor.numel() == 0 or start <= tensor.data_ptr() < end
    before = row.clone()
    loss = module(torch.randn(8, 3)).square().mean()
    loss.backward()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1).step()
    assert not torch.equal(row[: layout.trainable], before[: layout.trainable])
    assert not torch.equal(row[layout.trainable : layout.floats], before[layout.trainable : layout.floats])
    assert int(layout.state_dict(row)["norm.num_batches_tracked"]) == 1
    row[: layout.trainable] = 2.0
    assert module.scale.item() == 2.0
    assert torch.equal(module.body.weight.data, torch.full((5, 3), 2.0))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bound_module_computes_what_the_original_does(channels_last: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    randomise(module, 1)
    x = torch.randn(2, 3, 8, 8)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    bound = deepcopy(module)
    layout = Layout.of(bound, channels_last=channels_last)
    layout.bind(bound, layout.read(module))
    if channels_last:
        assert bound[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(bound[0].weight, module[0].weight)
    for mode in (False, True):
        assert torch.allclose(bound.train(mode)(x), module.train(mode)(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(bound[1].num_batches_tracked, module[1].num_batches_tracked)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_step_on_the_flat_slice_equals_a_step_on_every_tensor(channels_last: bool) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(5, 2, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    layout = Layout.of(module, channels_last=channels_last)
    row = layout.read(module)
    flat = row.clone()
    layout.bind(module, row)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
    gradient = torch.zeros(layout.trainable)
    for target, part in zip(layout.views(gradient), gradients, strict=True):
        target.copy_(part)
    for parameter, part in zip(parameters, gradients, strict=True):
        parameter.grad = part
    torch.optim.SGD(parameters, lr=0.3).step()
    flat[: layout.trainable].add_(gradient, alpha=-0.3)
    assert torch.equal(row[: layout.trainable], flat[: layout.trainable])


@pytest.mark.parametrize("row", [torch.zeros(3), torch.zeros(2, 5), torch.zeros(10, dtype=torch.float64)])
def test_rows_of_another_layout_are_refused(row: Tensor) -> None:
    module = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="a row of this layout"):
        Layout.of(module).bind(module, row)


@pytest.mark.parametrize("channels_last", [False, True])
def test_state_dict_is_contiguous_independent_and_loads(channels_last: bool) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), Tied())
    layout = Layout.of(module, channels_last=channels_last)
    row = layout.read(module)
    state = layout.state_dict(row)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in state.values())
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    before = {name: tensor.clone() for name, tensor in state.items()}
    row.fill_(-1)
    assert all(torch.equal(state[name], before[name]) for name in before)
    fresh = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), Tied())
    fresh.load_state_dict(state)
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in fresh.state_dict().items())


# checking and naming rows


@given(st.data(), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
@settings(deadline=None, max_examples=40)
def test_is_finite_sees_a_bad_float_anywhere(data: st.DataObject, bad: float) -> None:
    module = Odd()
    layout = Layout.of(module)
    row = layout.read(module)
    assert layout.is_finite(row)
    row[data.draw(st.integers(0, layout.floats - 1))] = bad
    assert not layout.is_finite(row)


def test_is_finite_is_not_fooled_by_integer_bytes() -> None:
    module = nn.BatchNorm1d(3)
    module.num_batches_tracked.fill_(0x7FC000007F800000)  # the bytes of a NaN and of an infinity
    layout = Layout.of(module)
    row = layout.read(module)
    assert not bool(row.isfinite().all())
    assert layout.is_finite(row)
    assert int(layout.state_dict(row)["num_batches_tracked"]) == 0x7FC000007F800000


@given(st.integers(0, 31), st.integers(0, 8))
@settings(deadline=None, max_examples=30)
def test_digest_changes_with_one_bit(bit: int, place: int) -> None:
    row = torch.arange(9, dtype=torch.float32)
    other = row.clone()
    other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest(row) == digest(row.clone())
    assert digest(other) != digest(row)


def test_digest_is_pinned() -> None:
    assert digest(torch.zeros(2)) == "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"


# the mean


def model_rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Layout, list[Tensor]]:
    module = Odd().to(dtype)
    layout = Layout.of(module)
    rows = []
    for index in range(count):
        randomise(module, seed + index)
        rows.append(layout.read(module))
    return layout, rows


def mean_of(layout: Layout, rows: list[Tensor], weights: list[float]) -> Tensor:
    mean = Mean(layout)
    for row, weight in zip(rows, weights, strict=True):
        mean.add(row, weight)
    target = layout.empty()
    assert mean.into(target)
    return target


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=9, max_size=9),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_equal_rows_have_exactly_themselves_as_mean(values: list[float], weights: list[int]) -> None:
    layout = Layout.of(nn.Linear(2, 3))
    row = torch.tensor(values, dtype=torch.float32)
    double, third = Layout.of(nn.Linear(2, 3).double()), torch.tensor(values, dtype=torch.float64) / 3
    assert torch.equal(mean_of(double, [third] * len(weights), [float(w) for w in weights]), third)
    assert torch.equal(mean_of(layout, [row] * len(weights), [float(w) for w in weights]), row)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any), st.randoms(), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_mean_matches_float64_in_any_order(weights: list[int], random: object, seed: int) -> None:
    layout, rows = model_rows(len(weights), seed)
    got = mean_of(layout, rows, [float(w) for w in weights])
    floats = np.stack([row[: layout.floats].numpy() for row in rows]).astype(np.float64)
    expected = np.average(floats, axis=0, weights=weights)
    assert np.allclose(got[: layout.floats].numpy(), expected, rtol=1e-6, atol=1e-6)
    order = list(range(len(weights)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other = mean_of(layout, [rows[i] for i in order], [float(weights[i]) for i in order])
    assert torch.allclose(other[: layout.floats], got[: layout.floats], rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(layout.views(got, Kind.INTEGER), layout.views(other, Kind.INTEGER), strict=True):
        assert torch.equal(mine, theirs)


def test_integers_take_the_largest_and_keep_their_dtype() -> None:
    layout, rows = model_rows(3)
    for row, mask, small, byte in zip(rows, ([0, 0, 1], [0, 1, 0], [0, 0, 0]), (-5, 3, -9), (1, 250, 7), strict=True):
        views = {e.name: e.view(row) for e in layout.entries}
        views["mask"].copy_(torch.tensor(mask))
        views["small"].fill_(small)
        views["byte"].fill_(byte)
        views["norm.num_batches_tracked"].fill_(2**40 + small)
    untouched = [row.clone() for row in rows]
    state = layout.state_dict(mean_of(layout, rows, [1.0, 2.0, 1.0]))
    assert state["mask"].tolist() == [False, True, True]
    assert state["small"].tolist() == [3, 3, 3]
    assert state["byte"].item() == 250
    assert state["norm.num_batches_tracked"].item() == 2**40 + 3
    assert [state[n].dtype for n in ("mask", "small", "byte")] == [torch.bool, torch.int32, torch.uint8]
    assert all(same_bits(a, b) for a, b in zip(rows, untouched, strict=True)), "the mean changes none of its rows"


def test_weight_zero_is_ignored_even_when_not_finite() -> None:
    layout, (first, second, bad) = model_rows(3)
    bad[: layout.floats] = float("nan")
    layout.views(bad, Kind.INTEGER)[0].fill_(1)
    assert same_bits(mean_of(layout, [bad, first, second], [0, 1, 3]), mean_of(layout, [first, second], [1, 3]))


def test_no_weight_leaves_the_target_untouched() -> None:
    layout, (row, target) = model_rows(2)
    before = target.clone()
    mean = Mean(layout)
    assert not mean.into(target)
    mean.add(row, 0.0)
    assert not mean.into(target)
    assert same_bits(target, before)


def test_negative_weights_are_refused() -> None:
    layout, (row,) = model_rows(1)
    with pytest.raises(ValueError, match="0 or more"):
        Mean(layout).add(row, -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_may_be_read_twice_and_go_on(dtype: torch.dtype) -> None:
    layout, (a, b, c) = model_rows(3, dtype=dtype)
    mean = Mean(layout)
    mean.add(a, 2.0)
    mean.add(b, 1.0)
    first, second, third = (layout.empty() for _ in range(3))
    mean.into(first)
    mean.into(second)
    assert same_bits(first, second)
    mean.add(c, 3.0)
    mean.into(third)
    assert same_bits(third, mean_of(layout, [a, b, c], [2.0, 1.0, 3.0]))
