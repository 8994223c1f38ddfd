"""Tests of trajectory matching: gradients, and exact properties.

Gradients are compared with finite differences and plain autograd.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.layout import Layout
from fedloom.methods._support.differentiable_augmentation import (
    KINDS,
    AugmentationDraw,
    _affine,
    parse_differentiable_augmentation,
)
from fedloom.methods._support.distillation import DistillationModel
from fedloom.methods._support.trajectory_matching import (
    TrajectoryMatchingData,
    TrajectoryStep,
    match_trajectory,
    trajectory_distance,
    trajectory_soft_label_loss,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CPU = torch.device("cpu")
SHAPE, CLASSES = (2, 6, 6), 3


def smooth() -> nn.Module:
    """A network with convolutions, a norm and no kink, in float64."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).double()


class Problem:
    """A network, a synthetic set and a segment of a trajectory."""

    def __init__(self, module: Callable[[], nn.Module] = smooth, count: int = 5, channels_last: bool = False) -> None:
        torch.manual_seed(0)
        made = module()
        self.layout = Layout.of(made, channels_last=channels_last)
        self.row = self.layout.read(made)
        self.network = DistillationModel(made, self.layout, CPU)
        self.target = self.row + 0.1 * torch.randn_like(self.row)
        images = torch.randn(count, *SHAPE, dtype=self.row.dtype)
        logits = torch.randn(count, CLASSES, dtype=self.row.dtype)
        self.data = TrajectoryMatchingData(images, logits, torch.tensor(0.7, dtype=self.row.dtype))

    def loss(self, data: TrajectoryMatchingData, steps: list[TrajectoryStep], kind: str = "squared") -> Tensor:
        """The same loss as a graph of ordinary operations, for autograd to go through."""
        w = start = self.row[: self.layout.trainable].clone().requires_grad_()
        target = self.target[: self.layout.trainable]
        for step in steps:
            x, y = step.take(data.images, data.label_logits)
            (g,) = torch.autograd.grad(
                trajectory_soft_label_loss(self.network(w, x, self.row), y), w, create_graph=True
            )
            w = w - data.learning_rate * g
        return trajectory_distance(w, target, kind) / trajectory_distance(start.detach(), target, kind)

    def steps(self, count: int, kinds: str = "none", batch: int = 0) -> list[TrajectoryStep]:
        generator = torch.Generator().manual_seed(1)
        size = len(self.data.images)
        made = []
        for k in range(count):
            index = torch.randperm(size, generator=generator)[:batch] if batch else None
            names = parse_differentiable_augmentation(kinds)
            draw = AugmentationDraw(batch or size, SHAPE, self.row.dtype, generator)
            made.append(TrajectoryStep(index, KINDS[names[k % len(names)]](draw) if names else None))
        return made


def close(one: TrajectoryMatchingData, other: TrajectoryMatchingData | tuple[Tensor, ...], rtol: float = 1e-9) -> None:
    others = other.tensors() if isinstance(other, TrajectoryMatchingData) else other
    for mine, theirs in zip(one.tensors(), others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize("kind", ["squared", "cosine"])
@pytest.mark.parametrize("remember", [False, True])
def test_gradients_agree_with_finite_differences(kind: str, remember: bool) -> None:
    problem, h = Problem(), 1e-5
    steps = problem.steps(3)
    found = match_trajectory(problem.network, problem.data, steps, problem.row, problem.target, kind, remember)
    generator = torch.Generator().manual_seed(3)
    for name in ("images", "label_logits", "learning_rate"):
        tensor, gradient = getattr(problem.data, name), getattr(found.gradients, name)
        flat = tensor.view(-1)
        for place in {int(p) for p in torch.randint(len(flat), (6,), generator=generator)}:
            value, losses = float(flat[place]), []
            for moved in (value + h, value - h):
                flat[place] = moved
                losses.append(
                    float(
                        match_trajectory(problem.network, problem.data, steps, problem.row, problem.target, kind).loss
                    )
                )
            flat[place] = value
            slope = (losses[0] - losses[1]) / (2 * h)
            assert float(gradient.view(-1)[place]) == pytest.approx(slope, rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("kind", ["squared", "cosine"])
@pytest.mark.parametrize(
    ("kinds", "batch"),
    [("none", 0), ("none", 3), ("dsa", 0), ("dsa", 2)],
    ids=["whole", "batches", "dsa", "dsa-batches"],
)
def test_the_sweep_is_what_autograd_finds(kind: str, kinds: str, batch: int) -> None:
    """With all graphs kept, with none kept, and by autograd through the unrolled loop."""
    problem = Problem()
    steps = problem.steps(6, kinds, batch)
    data = TrajectoryMatchingData(*(tensor.clone().requires_grad_() for tensor in problem.data.tensors()))
    loss = problem.loss(data, steps, kind)
    expected = torch.autograd.grad(loss, data.tensors())
    for remember in (False, True):
        found = match_trajectory(problem.network, problem.data, steps, problem.row, problem.target, kind, remember)
        torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
        close(found.gradients, expected)


@pytest.mark.parametrize("kind", ["squared", "cosine"])
@pytest.mark.parametrize(("rate", "count"), [(0.0, 4), (0.7, 0)])
def test_steps_that_lead_nowhere_have_loss_one(kind: str, rate: float, count: int) -> None:
    problem = Problem(lambda: smooth().float())
    data = TrajectoryMatchingData(problem.data.images, problem.data.label_logits, torch.tensor(rate))
    found = match_trajectory(problem.network, data, problem.steps(count), problem.row, problem.target, kind)
    assert float(found.loss) == 1.0
    assert torch.equal(found.end_weights, problem.row[: problem.layout.trainable])
    assert not found.gradients.images.any()
    assert not found.gradients.label_logits.any()
    assert bool(found.gradients.learning_rate != 0) == (count > 0)


@pytest.mark.parametrize("kind", ["squared", "cosine"])
def test_a_segment_that_does_not_move_teaches_nothing(kind: str) -> None:
    problem = Problem()
    found = match_trajectory(problem.network, problem.data, problem.steps(2), problem.row, problem.row.clone(), kind)
    assert float(found.loss) == 0.0
    assert all(not tensor.any() for tensor in found.gradients.tensors())
    assert not torch.equal(found.end_weights, problem.row[: problem.layout.trainable])


def test_arriving_at_the_target_has_loss_zero() -> None:
    problem = Problem()
    steps = problem.steps(3)
    end = match_trajectory(problem.network, problem.data, steps, problem.row, problem.target).end_weights
    assert float(match_trajectory(problem.network, problem.data, steps, problem.row, end).loss) == 0.0


@given(shift=st.floats(-50, 50), row=st.integers(0, 4))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_a_row_of_labels_changes_nothing(shift: float, row: int) -> None:
    problem = Problem()
    steps = problem.steps(2)
    moved = problem.data.label_logits.clone()
    moved[row] += shift
    data = TrajectoryMatchingData(problem.data.images, moved, problem.data.learning_rate)
    one, two = (match_trajectory(problem.network, d, steps, problem.row, problem.target) for d in (problem.data, data))
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-9, atol=0)
    close(one.gradients, two.gradients, rtol=1e-7)
    assert one.gradients.label_logits.sum(1).abs().max() < 1e-12, "so the gradient has no part along the constant"


def test_whole_batches_do_not_depend_on_the_order_of_the_samples() -> None:
    problem = Problem()
    order = torch.tensor([3, 0, 4, 1, 2])
    data = TrajectoryMatchingData(
        problem.data.images[order], problem.data.label_logits[order], problem.data.learning_rate
    )
    one, two = (
        match_trajectory(problem.network, d, problem.steps(3), problem.row, problem.target)
        for d in (problem.data, data)
    )
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(one.gradients.images[order], two.gradients.images, rtol=1e-8, atol=1e-13)


def test_the_loss_is_cross_entropy_over_classes() -> None:
    output, labels = torch.randn(7, 5, dtype=torch.float64), torch.arange(7) % 5
    certain = 1000.0 * F.one_hot(labels, 5).double()
    torch.testing.assert_close(trajectory_soft_label_loss(output, certain), F.cross_entropy(output, labels) / 5)
    mixed = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(trajectory_soft_label_loss(output, mixed), F.cross_entropy(output, mixed.softmax(1)) / 5)


def test_cosine_distance() -> None:
    u, v = torch.randn(2, 50, dtype=torch.float64)
    torch.testing.assert_close(trajectory_distance(u, v, "cosine"), 1 - F.cosine_similarity(u, v, dim=0))
    assert float(trajectory_distance(u, 3 * u, "cosine")) < 1e-30
    near = u.float() * (1 + 1e-4 * torch.randn(50))
    exact = 1 - F.cosine_similarity(u.float().double(), near.double(), dim=0)
    torch.testing.assert_close(trajectory_distance(u.float(), near, "cosine").double(), exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_of_a_row_is_the_module(channels_last: bool) -> None:
    """Tied weights, a frozen one, batch norm's statistics and a memory format of its own."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.one, self.two = nn.Linear(36, 36), nn.Linear(36, 36)
            self.two.weight = self.one.weight
            self.two.bias.requires_grad_(False)
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.avg_pool2d(self.norm(self.conv(x)), 2).flatten(1)
            return self.head(self.drop(self.two(self.one(x).tanh())))

    torch.manual_seed(0)
    module = Tied()
    for _ in range(3):
        module(torch.randn(8, *SHAPE))
    layout = Layout.of(module, channels_last=channels_last)
    row = layout.read(module)
    x = torch.randn(4, *SHAPE)
    expected = module.eval()(x).detach()
    network = DistillationModel(Tied(), layout, CPU)
    network.module.load_state_dict({"two.bias": module.two.bias}, strict=False)
    before = row.clone()
    weights = row[: layout.trainable].clone().requires_grad_()
    output = network(weights, x, row)
    torch.testing.assert_close(output.detach(), expected)
    (gradient,) = torch.autograd.grad(output.square().sum(), weights)
    module.zero_grad()
    module(x).square().sum().backward()
    for entry, mine in zip(layout.entries, layout.views(gradient), strict=False):
        torch.testing.assert_close(mine, module.get_parameter(entry.name).grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(row, before), "computing leaves the row alone"


def test_memory_without_kept_graphs_grows_by_one_row_a_step() -> None:
    """Counted by hooks on what autograd saves: the same for five steps as for one, but for the rows."""

    def peak(count: int, remember: bool) -> int:
        problem = Problem(count=40)
        alive, most = 0, 0

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, most
                self.tensor, self.size = tensor.detach(), tensor.numel()  # else an output would hold itself
                alive += self.size
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            match_trajectory(
                problem.network, problem.data, problem.steps(count), problem.row, problem.target, keep_graphs=remember
            )
        return most

    row = Problem().layout.size
    assert peak(5, False) - peak(1, False) <= 4 * row
    assert peak(5, True) > 3 * peak(1, True)


# Augmentation


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_changes_images_one_by_one_and_again_the_same(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(50, 3, 8, 12)
    changes = [
        KINDS[kind](AugmentationDraw(50, (3, 8, 12), x.dtype, torch.Generator().manual_seed(seed)))
        for seed in (0, 0, 1)
    ]
    one, again, other = (change(x) for change in changes)
    assert one.shape == x.shape
    assert torch.equal(one, again)
    assert torch.equal(changes[0](x), one), "a draw can be applied again"
    assert not torch.equal(one, other)
    moved = x.clone()
    moved[7] += 1
    different = (changes[0](moved) != one).flatten(1).any(1)
    assert different.nonzero().flatten().tolist() in ([7], []), "images do not mix"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_holds_less_than_the_images(kind: str) -> None:
    """Draws for all inner steps are there at once, where memory may grow by one row a step."""
    change = KINDS[kind](AugmentationDraw(50, (1, 40, 40), torch.float32, torch.Generator().manual_seed(0)))
    held = [cell.cell_contents for cell in change.__closure__ or ()]  # type: ignore[attr-defined]
    sizes = [tensor.numel() * tensor.element_size() for tensor in held if isinstance(tensor, Tensor)]
    assert sizes
    assert sum(sizes) < 50 * 40 * 40 * 4 / 4


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_through_a_change(kind: str) -> None:
    draw = AugmentationDraw(3, (2, 5, 6), torch.float64, torch.Generator().manual_seed(2))
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(KINDS[kind](draw), x)


def test_what_the_changes_do() -> None:
    def draw() -> AugmentationDraw:
        return AugmentationDraw(200, (1, 8, 8), torch.float32, torch.Generator().manual_seed(0))

    ones = torch.ones(200, 1, 8, 8)
    holes = (KINDS["cutout"](draw())(ones) == 0).sum((1, 2, 3))
    assert holes.max() == 16
    assert holes.min() >= 4, "half the sides, and at most half of each sticks out"
    ramp = torch.arange(8.0).expand(200, 1, 8, 8)
    flipped = (KINDS["flip"](draw())(ramp)[:, 0, 0, 0] == 7).float().mean()
    assert 0.4 < flipped < 0.6
    spot = torch.zeros(200, 1, 8, 8)
    spot[:, :, 4, 4] = 1
    places = KINDS["crop"](draw())(spot).flatten(1).argmax(1)
    assert {(int(p) // 8, int(p) % 8) for p in places} == {(i, j) for i in (3, 4, 5) for j in (3, 4, 5)}
    grey = KINDS["color"](draw())(0.5 * ones)
    torch.testing.assert_close(grey.amax((1, 2, 3)), grey.amin((1, 2, 3)), msg="an even image stays even")
    assert (grey[:, 0, 0, 0] - 0.5).abs().max() <= 0.5
    for kind in ("scale", "rotate"):
        turned = KINDS[kind](draw())(spot + torch.rot90(spot, 2, (2, 3)))
        torch.testing.assert_close(turned, torch.rot90(turned, 2, (2, 3)), msg="about the centre")


def test_sampling_is_that_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    theta = torch.eye(2, 3, dtype=torch.float64) + 0.3 * torch.randn(6, 2, 3, dtype=torch.float64)
    mine = _affine(theta, AugmentationDraw(6, (3, 7, 9), torch.float64, torch.Generator()))(x)
    theirs = F.grid_sample(x, F.affine_grid(theta, [6, 3, 7, 9], align_corners=False), align_corners=False)
    torch.testing.assert_close(mine, theirs)
    weights = torch.randn_like(mine)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x) for y in (mine, theirs)))


def test_kinds_by_name() -> None:
    assert parse_differentiable_augmentation("none") == ()
    assert parse_differentiable_augmentation("dsa") == tuple(KINDS)
    assert parse_differentiable_augmentation("flip+crop") == ("flip", "crop")
    for wrong in ("", "flip+", "flop", "flip+flip", "dsa+flip"):
        with pytest.raises(ValueError, match="joined by"):
            parse_differentiable_augmentation(wrong)


def test_the_loss_falls_on_a_small_problem() -> None:
    """Images and labels that learn to lead from one model to another."""
    problem = Problem()
    data = TrajectoryMatchingData(*(tensor.clone() for tensor in problem.data.tensors()))
    losses = []
    for _ in range(30):
        found = match_trajectory(problem.network, data, problem.steps(3), problem.row, problem.target)
        losses.append(float(found.loss))
        for tensor, gradient in zip(data.tensors(), found.gradients.tensors(), strict=True):
            tensor.sub_(gradient, alpha=1.0)
    assert losses[-1] < 0.97 * losses[0]
    assert losses[-1] < 1
    assert np.isfinite(losses).all()
