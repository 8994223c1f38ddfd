"""Tests that permuted units leave the outputs of a network unchanged.

Networks that cannot be traced are rejected.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from fedloom.methods.matching.axes import (
    Axis,
    AxisSegment,
    AxisUnits,
    is_fixed_axis,
    make_fixed_axis,
    make_permutable_axis,
    reshape_axes,
    resolve_axis_segments,
    slice_axis,
    tie_axes,
)
from fedloom.methods.matching.symmetries import Symmetries, find_symmetries
from fedloom.models.registry import build_model


class Gated(nn.Module):
    """Units that are scaled by constants, pooled over, joined and cut apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 4)
        self.slope = nn.PReLU(6)
        self.mixed = nn.Linear(10, 8)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.mixed(torch.cat([self.slope(self.a(x)) * 2, torch.sigmoid(self.b(x))], dim=1))
        low, high = both.chunk(2, dim=1)
        out: Tensor = self.head(low * torch.tanh(high) + low.mean(1, keepdim=True))
        return out


class Turned(nn.Module):
    """Weights that are used without a layer, and axes that are moved about."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6))
        self.depth = nn.Conv1d(6, 6, 1, groups=6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x @ self.w).unsqueeze(-1).expand(-1, -1, 2)
        x = self.depth(x).permute(0, 2, 1)[:, 0]
        out: Tensor = self.head(self.norm(x))
        return out


class Recurrent(nn.Module):
    """Two layers in both directions, read by all of their steps or by their last state."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.head, self.last = nn.Linear(4 if last else 8, 3), last

    def forward(self, x: Tensor) -> Tensor:
        steps, state = self.gru(x)
        out: Tensor = self.head(state[-1] if self.last else steps.mean(1))
        return out


def from_catalogue(name: str, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: build_model(name, shape, 10, 20)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)), (5,), 2),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        (5,),
        1,
    ),
    "convolutions and flatten": (from_catalogue("lenet", (3, 32, 32)), (3, 32, 32), 4),
    "with norms": (from_catalogue("lenet:norm=batch", (3, 32, 32)), (3, 32, 32), 4),
    "batch norm without statistics": (from_catalogue("lenet:norm=batch-stateless", (3, 32, 32)), (3, 32, 32), 4),
    "two groups of channels": (from_catalogue("lenet:norm=group", (3, 32, 32)), (3, 32, 32), 6),
    "a norm for each channel": (from_catalogue("lenet:norm=instance", (3, 32, 32)), (3, 32, 32), 4),
    "resnet, shortcuts with weights": (from_catalogue("resnet20:shortcut=B,width=4", (1, 8, 8)), (1, 8, 8), 12),
    "resnet, padded shortcuts": (from_catalogue("resnet20:width=4", (1, 8, 8)), (1, 8, 8), 12),
    "early norms, and one that is not used": (from_catalogue("resnet20-bottleneck:width=4", (1, 8, 8)), (1, 8, 8), 16),
    "lstm": (from_catalogue("lstm-sent140:hidden=6,embedding=5,dense=7", (9,)), (9,), 4),
    "gru": (Recurrent, (6, 5), 4),
    "gates": (Gated, (5,), 3),
    "turned": (Turned, (5,), 1),
    "nothing hidden": (from_catalogue("logreg", (1, 8, 8)), (1, 8, 8), 0),
}


def made(name: str) -> tuple[nn.Module, Layout, Tensor, Symmetries, tuple[int, ...]]:
    """A network in double precision whose tensors are all random, and its symmetries."""
    make, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    module = make().double().eval()
    layout = Layout.of(module)
    row = layout.read(module)
    row[: layout.floats] += 0.1 * torch.rand(layout.floats, dtype=torch.float64)
    return module, layout, row, find_symmetries(module, layout, shape), shape


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permutation_leaves_the_function_unchanged(name: str) -> None:
    module, layout, row, symmetries, shape = made(name)
    assert len(symmetries.groups) == NETWORKS[name][2]
    assert len({group.name for group in symmetries.groups}) == len(symmetries.groups)
    orders = symmetries.random(torch.Generator().manual_seed(1))
    other = symmetries.permuted(row, orders)
    x = torch.rand((4, *shape), dtype=torch.float64) if name != "lstm" else torch.randint(0, 20, (4, *shape))
    outputs = []
    for each in (row, other):
        layout.bind(module, each)
        outputs.append(module(x).detach())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
    for group, order in zip(symmetries.groups, orders, strict=True):
        one = row.clone()
        group.permute_(one, order)
        assert not torch.equal(one, row) or torch.equal(order, torch.arange(group.size)), group.name
    back = symmetries.permuted(other, [torch.argsort(order) for order in orders])
    assert torch.equal(back, row)


@pytest.mark.parametrize("name", ["with norms", "resnet, padded shortcuts", "lstm"])
def test_a_permutation_matrix_permutes(name: str) -> None:
    _, _, row, symmetries, _ = made(name)
    orders = symmetries.random(torch.Generator().manual_seed(1))
    moved = row.clone()
    for group, order in zip(symmetries.groups, orders, strict=True):
        group.transport_(moved, torch.eye(group.size, dtype=torch.float64)[order])
    assert torch.equal(moved, symmetries.permuted(row, orders))


def test_all_writers_of_a_stream_share_its_permutation() -> None:
    *_, symmetries, _ = made("resnet, shortcuts with weights")
    stream = symmetries.groups[0]
    written = {tie.entry.name for tie in stream.ties if tie.produces_units and len(tie.entry.shape) == 4}
    assert written == {"conv1.weight", *(f"body.layer1.{i}.conv2.weight" for i in range(3))}
    read = {tie.entry.name for tie in stream.ties if not tie.produces_units}
    inner = {f"body.layer1.{i}.conv1.weight" for i in range(3)}
    assert read == inner | {"body.layer2.0.conv1.weight", "body.layer2.0.shortcut.conv.weight"}
    buffers = {tie.entry.name for tie in stream.ties if tie.entry.kind is TensorKind.BUFFER}
    assert {"norm1.running_mean", "norm1.running_var", "body.layer1.2.norm2.running_var"} <= buffers


def test_a_channel_takes_its_pixels_along_when_flattened() -> None:
    *_, symmetries, _ = made("convolutions and flatten")
    tie = next(tie for tie in symmetries.groups[1].ties if tie.entry.name == "fc1.weight")
    assert (tie.axis, tie.start, tie.inner, tie.produces_units) == (1, 0, 25, False)


def test_what_lies_in_channels_last_order_is_permuted_too() -> None:
    module = build_model("lenet", (3, 32, 32), 10)
    rows = []
    for channels_last in (False, True):
        layout = Layout.of(module, channels_last=channels_last)
        symmetries = find_symmetries(module, layout, (3, 32, 32))
        row = symmetries.permuted(layout.read(module), symmetries.random(torch.Generator().manual_seed(3)))
        rows.append(layout.state_dict(row))
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


def test_a_frozen_layer_holds_its_units_where_they_are() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    groups = find_symmetries(module, Layout.of(module), (4,)).groups
    assert [(group.name, group.size) for group in groups] == [("2", 5)]


def test_a_vector_that_is_not_uniform_holds_units_where_they_are() -> None:
    class Marked(nn.Module):
        def __init__(self, marks: Tensor) -> None:
            super().__init__()
            self.first, self.head, self.marks = nn.Linear(4, 6), nn.Linear(6, 2), marks

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.first(x) * self.marks)
            return out

    counts = []
    for marks in (torch.full((6,), 2.0), torch.arange(6.0)):
        module = Marked(marks)
        counts.append(len(find_symmetries(module, Layout.of(module), (4,)).groups))
    assert counts == [1, 0]


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.sort(self.first(x)).values)
        return out


class Hides(Sorts):
    """Looks at one unit behind the back of torch's functions."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scale = 1.0 + abs(float(hidden.detach().numpy()[0, 0]))
        out: Tensor = self.head(hidden) * scale
        return out


def test_networks_that_cannot_be_understood_are_refused_by_name() -> None:
    module = Sorts()
    with pytest.raises(InputError, match=r"model Sorts cannot be matched: .*'sort'.*near first"):
        find_symmetries(module, Layout.of(module), (4,))
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(InputError, match="2 groups"):
        find_symmetries(grouped, Layout.of(grouped), (4, 1, 1))
    recurrent = Recurrent(last=True)
    with pytest.raises(InputError, match=r"model Recurrent cannot be matched: .*last state"):
        find_symmetries(recurrent, Layout.of(recurrent), (6, 5))


def test_a_network_that_only_seems_to_be_understood_is_refused() -> None:
    torch.manual_seed(0)
    module = Hides()
    with pytest.raises(InputError, match="model Hides cannot be matched: it computes something else"):
        find_symmetries(module, Layout.of(module), (4,))


# Axes


def sizes(axis: Axis) -> list[tuple[int, int, bool]]:
    return [(segment.units.size, segment.inner, segment.units.fixed) for segment in resolve_axis_segments(axis)]


def test_tying_splits_joins_and_bundles() -> None:
    whole, first, second = make_permutable_axis(6), make_permutable_axis(2), make_permutable_axis(4)
    tie_axes(whole, (*first, *second))
    assert sizes(whole) == [(2, 1, False), (4, 1, False)]
    assert resolve_axis_segments(whole)[1].units is resolve_axis_segments(second)[0].units
    wide = make_permutable_axis(12)
    tie_axes(wide, (AxisSegment(AxisUnits(3), 4),))
    assert sizes(wide) == [(3, 4, False)]
    half = make_permutable_axis(4)
    tie_axes(half, (*make_fixed_axis(2), *make_permutable_axis(2)))
    assert sizes(half) == [(2, 1, True), (2, 1, False)]
    odd = make_permutable_axis(5)
    tie_axes(odd, (AxisSegment(AxisUnits(2), 2), *make_fixed_axis(1)))
    assert sizes(odd) == [(2, 2, False), (1, 1, True)]
    with pytest.raises(ValueError, match="6 and 5"):
        tie_axes(make_permutable_axis(6), make_permutable_axis(5))


def test_bundles_that_do_not_fit_are_fixed() -> None:
    a, b = (AxisSegment(AxisUnits(2), 3),), (AxisSegment(AxisUnits(3), 2),)
    tie_axes(a, b)
    assert is_fixed_axis(a)
    assert is_fixed_axis(b)


def test_parts_and_shapes() -> None:
    axis = (AxisSegment(AxisUnits(4), 3),)
    assert sizes(slice_axis(axis, 3, 6)) == [(2, 3, False)]
    assert sizes(axis) == [(1, 3, True), (2, 3, False), (1, 3, True)]
    through = (AxisSegment(AxisUnits(4), 3),)
    assert is_fixed_axis(slice_axis(through, 0, 4))
    assert is_fixed_axis(through)
    maps = [make_fixed_axis(2), make_permutable_axis(3), make_fixed_axis(4), make_fixed_axis(1)]
    flattened = reshape_axes(maps, (2, 3, 4, 1), (2, 12))
    assert sizes(flattened[1]) == [(3, 4, False)]
    again = reshape_axes(flattened, (2, 12), (2, 3, 2, 2))
    assert resolve_axis_segments(again[1]) == resolve_axis_segments(maps[1])
    cut = [make_fixed_axis(2), make_permutable_axis(12)]
    assert is_fixed_axis(reshape_axes(cut, (2, 12), (2, 3, 4))[1])
