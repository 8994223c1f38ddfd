"""Tests of the layout of a row: entries, binding without copies, exact values."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from tests.support.layout_networks import Odd, Tied, networks, randomise, same_bits

# layouts


def test_layout_holds_every_kind_in_its_block() -> None:
    module = Odd()
    layout = Layout.of(module)
    by_kind = {kind: [e.name for e in layout.entries if e.kind is kind] for kind in TensorKind}
    assert by_kind[TensorKind.PARAMETER] == ["scale", "body.weight", "body.bias", "norm.weight", "norm.bias"]
    assert by_kind[TensorKind.BUFFER] == ["norm.running_mean", "norm.running_var"]
    assert sorted(by_kind[TensorKind.INTEGER]) == ["byte", "mask", "norm.num_batches_tracked", "small", "void"]
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
        assert gap == 0 or entry.kind is TensorKind.INTEGER
        assert 0 <= entry.gap < 4
        assert entry.gap == 0 or entry.kind is TensorKind.BUFFER
        assert entry.kind is not TensorKind.BUFFER or entry.size % 4 or entry.offset % 4 == 0
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
    units = layout.layer_columns()
    assert list(units) == ["0", "2", "3"]
    assert [len(units[name]) for name in units] == [2, 5, 1]
    covered = torch.zeros(layout.size)
    for columns in units.values():
        for part in columns:
            covered[part] += 1
    assert covered.max() == 1
    assert covered.sum() == sum(e.size for e in layout.entries)


def test_units_are_in_the_order_of_the_model_and_not_of_the_row() -> None:
    """A norm without weights has buffers alone, which lie behind all parameters."""
    norms = [nn.BatchNorm1d(3, affine=False) for _ in range(2)]
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), norms[0], nn.Linear(3, 3), norms[1], nn.Linear(3, 1)))
    units = layout.layer_columns()
    assert list(units) == ["0", "1", "2", "3", "4"]
    for name, columns in units.items():
        assert columns == [entry.columns for entry in layout.entries if entry.layer == name]


def test_both_factors_of_a_low_rank_adaptation_are_one_unit() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    layout = Layout.of(nn.Sequential(Adapted(), nn.Linear(4, 1)))
    assert {name: len(columns) for name, columns in layout.layer_columns().items()} == {
        "0": 2,
        "0.base_layer": 2,
        "1": 2,
    }
    alone = Layout.of(Adapted())
    assert {name: len(columns) for name, columns in alone.layer_columns().items()} == {"": 2, "base_layer": 2}, (
        "of no other"
    )


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


def test_models_in_another_order_are_not_exchanged() -> None:
    """A site would take the weights of its convolutions for others."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3))
    orders = [Layout.of(module, channels_last=channels_last).fingerprint() for channels_last in (False, True, True)]
    assert orders[0] != orders[1] == orders[2]
