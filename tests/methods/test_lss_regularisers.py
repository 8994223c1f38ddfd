"""Tests of LSS: affinity and diversity, their gradients, unbounded coefficients."""

from math import factorial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.lss import LSSOptions
from fedloom.testing.fixtures import small_run
from tests.support.lss_trainers import grow, seat, soup

pytestmark = pytest.mark.usefixtures("one_thread")


def regulariser(x: Tensor, f_p: Tensor, frozen: Tensor, o: LSSOptions) -> Tensor:
    """Affinity and diversity as the paper and the authors' code write them, for autograd to differentiate."""
    unit = f_p.norm() if o.scale == "relative" else torch.ones(())

    def dist(a: Tensor, b: Tensor) -> Tensor:
        square = ((a - b) / unit).square().sum()
        return square if o.distance == "squared" else square.sqrt()

    pool = [f_p] * o.include_init + [f_p + row for row in frozen]
    if o.spread == "mean":
        spread = sum((dist(x, m) for m in pool), start=torch.zeros(())) / (len(pool) + 1)
    else:  # Cayley and Menger's determinant of the squared distances
        points = [*pool, x]
        k = len(points)
        table = [[((a - b) / unit).square().sum() for b in points] for a in points]
        border = torch.ones(k + 1, k + 1, dtype=x.dtype)
        border[0, 0] = 0
        matrix = torch.cat([border[:1], torch.cat([border[1:, :1], torch.stack([*map(torch.stack, table)])], 1)])
        spread = (-1) ** k * torch.linalg.det(matrix) / (2 ** (k - 1) * factorial(k - 1) ** 2)
    return o.affinity * dist(x, f_p) - o.diversity * spread


@given(
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([("l2", "mean"), ("squared", "mean"), ("squared", "volume")]),
    st.sampled_from(["relative", "absolute"]),
    st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=80)
def test_gradients_of_the_regularisers_are_right(
    frozen: int, init: bool, kind: tuple[str, str], scale: str, seed: int
) -> None:
    assume(frozen or init)  # else there is nothing to be diverse from
    distance, spread = kind
    local = soup(affinity=1.3, diversity=0.9, include_init=init, distance=distance, spread=spread, scale=scale)
    bench = seat()
    torch.manual_seed(seed)
    f_p = bench.received.normal_()
    # short ways, so that volumes stay below the bound that keeps the loss bounded
    rows = 0.1 * torch.randn(frozen + 1, len(f_p), dtype=f_p.dtype)
    next(local.train(bench))  # for the unit
    bench.scratch["rows"], bench.scratch["alone"] = rows, False
    local.survey(bench, rows[:-1])
    bench.gradient.zero_()
    local.adjust_gradient(bench)
    x = (f_p + rows[-1]).requires_grad_()
    (expected,) = torch.autograd.grad(regulariser(x, f_p, rows[:-1], local.options), x)
    torch.testing.assert_close(bench.gradient, expected, rtol=1e-6, atol=1e-9)


def test_a_volume_never_outgrows_affinity() -> None:
    """However far apart the frozen members are, the push on a distant member is weaker than the pull."""
    local = soup(affinity=1.0, diversity=0.9, distance="squared", spread="volume", scale="absolute")
    bench = seat()
    next(local.train(bench))
    rows = bench.scratch["rows"] = 100 * torch.randn(4, len(bench.weights), dtype=torch.float64)
    rows[-1] *= 1e6
    local.survey(bench, rows[:-1])
    bench.gradient.zero_()
    local.adjust_gradient(bench)
    assert float(bench.gradient @ rows[-1]) > 0, "the gradient points outwards, so a step leads back"


@pytest.mark.parametrize("distance", ["l2", "squared"])
def test_at_its_birth_the_first_member_is_neither_pulled_nor_pushed(distance: str) -> None:
    bench, local = seat(), soup(models=1, distance=distance)
    next(local.train(bench))
    bench.scratch["rows"][-1].zero_()
    bench.gradient.zero_()
    local.adjust_gradient(bench)
    assert torch.equal(bench.gradient, torch.zeros_like(bench.gradient))


def test_affinity_holds_the_members_at_the_received_model() -> None:
    ways = []
    for affinity in (0.0, 1.0, 4.0):
        bench = seat(epochs=10)
        grow(soup(affinity=affinity, diversity=0, scale="absolute", distance="squared"), bench)
        ways.append(float((bench.weights - bench.received[: bench.layout.trainable]).norm()))
    assert ways[0] > 2 * ways[1] > 4 * ways[2] > 0


def test_diversity_drives_the_members_apart() -> None:
    gaps = []
    for diversity in (0.0, 3.0):
        pool = grow(soup(diversity=diversity), seat(epochs=10))
        gaps.append(float(torch.pdist(pool).mean()))
    assert gaps[1] > 1.05 * gaps[0]


def test_three_is_too_much_for_plain_distances_and_not_for_relative_ones() -> None:
    """The letter of the paper, on whole rows: every member stays within a few steps' length of the received model."""
    ways = {}
    for name, options in {"text": {"distance": "l2", "scale": "absolute"}, "default": {}}.items():
        bench = seat(epochs=30, lr=0.01)
        grow(soup(**options), bench)
        ways[name] = float((bench.weights - bench.received[: bench.layout.trainable]).norm())
    assert ways["default"] > 5 * ways["text"]


def test_affinity_alone_on_squared_distances_is_fedprox() -> None:
    alone = {"models": 1, "include_init": False, "distance": "squared", "scale": "absolute", "diversity": 0.0}
    ours = small_run("lss", {"lss": {**alone, "affinity": 0.05}})
    theirs = small_run("fedprox", {"fedprox": {"mu": 0.1}})
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.loss != pytest.approx(small_run("fedavg", {}).loss, rel=1e-4)


# coefficients


@given(st.floats(0, 5), st.floats(0, 5), st.integers(1, 6), st.booleans(), st.sampled_from(["l2", "squared"]))
@settings(deadline=None, max_examples=150)
def test_refused_is_what_has_no_minimum(
    affinity: float, diversity: float, models: int, init: bool, distance: str
) -> None:
    count = models + init
    gap = affinity - diversity * (count - 1) / count
    assume(abs(gap) > 1e-3)
    values = {"affinity": affinity, "diversity": diversity, "models": models, "include_init": init}
    free = LSSOptions.model_construct(**values, distance=distance, scale="absolute", spread="mean")
    generator = torch.Generator().manual_seed(models)
    f_p, *rows = torch.randn(models, 4, generator=generator, dtype=torch.float64)
    far = torch.randn(4, generator=generator, dtype=torch.float64)
    there = regulariser(f_p + 1e9 * far, f_p, torch.stack(rows) if rows else f_p[:0].view(0, 4), free)
    assert (float(there) > 0) == (gap > 0), "far away it rises or falls for ever"
    if gap > 0:
        assert LSSOptions(**values, distance=distance).affinity == affinity
    else:
        with pytest.raises(ValidationError, match="no minimum"):
            LSSOptions(**values, distance=distance)
        assert LSSOptions(**values, distance=distance, allow_unbounded=True).affinity == affinity


@pytest.mark.parametrize(
    "options",
    [
        {"affinity": 0.0},
        {"diversity": 4.0},
        {"spread": "volume", "affinity": 1e-5, "diversity": 0.1, "distance": "squared"},
        {"spread": "volume", "distance": "l2"},
    ],
)
def test_unbounded_coefficients_are_accepted_if_asked_for(options: dict[str, Any]) -> None:
    """Those of Figure 5 and of the authors' code. A few steps of them train; others keep their bits."""
    with pytest.raises(InputError, match=r"set lss\.allow_unbounded=true"):
        compose("lss", {"lss": options})
    few = {"models": 2, "steps": 3}
    given_ = {"lss": {**few, **options, "allow_unbounded": True}}
    assert small_run("lss", given_).digest != small_run("lss", {"lss": few}).digest


def test_allowing_unbounded_coefficients_changes_no_others() -> None:
    allowed = small_run("lss", {"lss": {"allow_unbounded": True}})
    assert allowed.digest == small_run("lss", {}).digest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"affinity": 2.0}, "affinity must be above 2.4, which is diversity x 4/5 for a pool of 5, not 2.0"),
        ({"affinity": 2.0, "include_init": False}, "above 2.25, which is diversity x 3/4"),
        ({"affinity": 2.4, "distance": "squared"}, "no minimum"),
        ({"spread": "volume", "distance": "l2"}, "spread=volume needs distance=squared"),
        ({"spread": "volume", "affinity": 1e-5, "diversity": 0.1, "distance": "squared"}, "must be above diversity"),
        ({"spread": "volume", "affinity": 1e-3, "diversity": 1e-3, "distance": "squared"}, "must be above diversity"),
        ({"share": True, "epochs": 2}, "share divides the run's own epochs"),
        ({"epochs": 1, "steps": 1}, "one of them is enough"),
        ({"affinity": -1.0}, "affinity must be"),
        ({"models": -1}, "models must be"),
    ],
)
def test_what_is_refused_is_explained_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        compose("lss", {"lss": options})
    said = str(error.value)
    assert sentence in said
    assert said.startswith("lss.")
    assert said.endswith(".")
    assert "\n" not in said


def test_at_equality_an_l2_distance_still_has_a_minimum() -> None:
    assert LSSOptions(affinity=2.4, distance="l2").affinity == 2.4
    assert LSSOptions(affinity=0, diversity=0, spread="volume").diversity == 0
