"""Local Superior Soups: the pool, its regularisers, and what is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import factorial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.bench import Batch, Bench, Workshop
from fedloom.data import Prepare, Samples
from fedloom.errors import InputError
from fedloom.methods import compose, lss
from fedloom.methods.base import Context, Local
from fedloom.methods.lss import LSSLocal, LSSOptions, simplex_weights
from fedloom.rows import Layout
from fedloom.small_runs import plain_network, small_run
from fedloom.streams import Streams
from fedloom.testing import check_method
from fedloom.training import Training

CONTEXT: Context = None  # type: ignore[assignment]  # a Local asks the run for nothing
AUTHORS = {"distance": "squared", "spread": "volume", "affinity": 0.01, "diversity": 0.005, "include_init": False}
"""The shape of the authors' code, with coefficients for which there is a minimum."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As engines compute; on networks as small as these more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Widen(nn.Module):
    """Samples come in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def network(*middle: nn.Module) -> nn.Module:
    """A network in float64, so that what should be equal can be told from what is nearly so."""
    return nn.Sequential(Widen(), nn.Linear(5, 4), *middle, nn.Linear(4, 3)).double()


def seat(count: int = 40, module: nn.Module | None = None, **options: Any) -> Bench:
    """A bench with a client on it."""
    torch.manual_seed(0)
    module = module or network(nn.Tanh())
    layout, training = Layout.of(module), Training(**{"batch_size": 10, "epochs": 1, "lr": 0.1, **options})
    bench = Bench(Workshop(module, layout, F.cross_entropy, Prepare.identity(), training, Streams(0), classes=3))
    samples = Samples(torch.randn(count, 5), torch.arange(count) % 3)
    received = layout.read(module)
    bench.begin(0, 0, samples, layout.empty(), received, {}, {}, {}, True)
    return bench


def soup(**options: Any) -> LSSLocal:
    return LSSLocal(CONTEXT, LSSOptions(**options))


def grow(local: LSSLocal, bench: Bench, look: Callable[[int], None] = lambda i: None) -> Tensor:
    """Train the client; `look(i)` is called when member i has been trained. The trained members."""
    for i, piece in enumerate(local.train(bench)):
        bench.run(piece)
        torch.sub(bench.weights, bench.received[: bench.layout.trainable], out=bench.scratch["rows"][i])
        look(i)
    return bench.received[: bench.layout.trainable] + bench.scratch["rows"]


@contextmanager
def forced(weights: Callable[[int], Tensor]) -> Iterator[list[int]]:
    """Interpolate with these weights; the sizes that were asked for."""
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lss, "simplex_weights", lambda count, like: asked.append(count) or weights(count).to(like))
        yield asked


# the weights


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_weights_are_uniform_on_the_simplex(count: int) -> None:
    """Then P(a_1 > t) = (1 - t)^(count - 1), and one coordinate is like another."""
    torch.manual_seed(0)
    draws = torch.stack([simplex_weights(count, torch.zeros(1)) for _ in range(6000)])
    assert draws.shape == (6000, count)
    assert bool((draws >= 0).all())
    torch.testing.assert_close(draws.sum(1), torch.ones(6000))
    for column in draws.T:
        assert float(column.mean()) == pytest.approx(1 / count, abs=0.01)
        for t in (0.1, 0.3, 0.6):
            assert float((column > t).float().mean()) == pytest.approx((1 - t) ** (count - 1), abs=0.03)


@pytest.mark.parametrize(("options", "sizes"), [({}, [2, 3, 4]), ({"include_init": False}, [2, 3])])
def test_the_weights_are_over_the_whole_pool(options: dict[str, Any], sizes: list[int]) -> None:
    bench = seat()
    with forced(lambda count: torch.full((count,), 1 / count)) as asked:
        grow(soup(models=3, **options), bench)
    assert asked == [size for size in sizes for _ in range(4)], "four steps of each member"


# the pool


@pytest.mark.parametrize("options", [{}, AUTHORS, {"first_alone": True}, {"distance": "l2"}])
def test_only_the_active_member_moves_and_each_starts_at_the_mean(options: dict[str, Any]) -> None:
    bench, local = seat(), soup(models=4, **options)
    received, init = bench.received.clone(), local.options.include_init
    seen: list[Tensor] = []
    for i, piece in enumerate(local.train(bench)):
        frozen = bench.scratch["rows"][:i].clone()
        f_p = received[: bench.layout.trainable]
        pool = torch.stack([f_p] * init + [f_p + row for row in frozen] or [f_p])
        torch.testing.assert_close(bench.weights, pool.mean(0), msg="a member starts at the mean of the pool")
        before = bench.weights.clone()
        bench.run(piece)
        assert torch.equal(bench.scratch["rows"][:i], frozen), "frozen members stay as they are"
        assert torch.equal(bench.received, received)
        assert not torch.equal(bench.weights, before)
        assert not bench.scratch["rows"].requires_grad
        seen.append(bench.weights.clone())
    mean = torch.stack([f_p] * init + seen).mean(0)
    torch.testing.assert_close(bench.weights, mean)


@pytest.mark.parametrize("options", [{"models": 0}, {"epochs": 0}, {"steps": 0}, {"epochs": 0, "include_init": False}])
def test_without_training_the_received_model_is_sent(options: dict[str, Any]) -> None:
    bench = seat(module=network(nn.BatchNorm1d(4)))
    for piece in soup(**options).train(bench):
        bench.run(piece)
    assert torch.equal(bench.row, bench.received)


def test_the_gradient_is_the_weight_times_the_gradient_at_the_point() -> None:
    """Held against autograd through the sum of the members."""
    bench, local = seat(), soup(models=3, affinity=0, diversity=0)
    model, layout = bench._shop.module, bench.layout
    checked: list[float] = []

    def step(batch: Batch) -> None:
        leaf = bench.weights.clone().requires_grad_()
        f_p = bench.received[: layout.trainable]
        others = [f_p, *(f_p + bench.scratch["rows"][:-1])]
        a = simplex_weights(len(others) + 1, leaf)
        point = sum((w * m for w, m in zip(a, [*others, leaf], strict=True)), start=torch.zeros_like(leaf))
        named = {entry.name: entry.view(point) for entry in layout.entries}
        loss = F.cross_entropy(functional_call(model, named, batch.x), batch.y)
        (expected,) = torch.autograd.grad(loss, leaf)
        with forced(lambda count: a):
            got = LSSLocal.step(local, bench, batch)
        torch.testing.assert_close(got, loss)
        torch.testing.assert_close(bench.gradient, expected)
        checked.append(float(expected.norm()))

    for piece in local.train(bench):
        for cut in bench._cuts(piece):
            step(bench._fetch(cut))
    assert len(checked) == 12
    assert min(checked) > 0


def test_with_all_weight_on_the_member_it_is_plain_training() -> None:
    for optimizer, lr in (("adam", 0.01), ("sgd", 0.1)):
        plain, bench = seat(optimizer=optimizer, lr=lr), seat(optimizer=optimizer, lr=lr)
        for piece in Local.train(Local(CONTEXT, LSSOptions()), plain):
            plain.run(piece)
        with forced(lambda count: torch.eye(count)[-1]):
            (member,) = grow(soup(models=1, affinity=0, diversity=0), bench)
        torch.testing.assert_close(member, plain.weights, rtol=1e-9, atol=1e-12)
        assert plain.weights.sub(plain.received[: plain.layout.trainable]).norm() > 0.01


@pytest.mark.parametrize(("init", "sizes"), [(True, [3, 4]), (False, [2, 3])])
def test_a_first_member_trained_alone_is_neither_interpolated_nor_pushed(init: bool, sizes: list[int]) -> None:
    """Ordinary training on the loss and affinity, as in the authors' code; the others go on as usual."""
    options = {"scale": "absolute", "affinity": 1.0, "first_alone": True, "include_init": init}
    with forced(lambda count: torch.full((count,), 1 / count)) as asked:
        first = grow(soup(models=3, diversity=0.9, **options), seat())[0]
    assert asked == [size for size in sizes for _ in range(4)], "four steps of the second and of the third member"
    bench = seat()
    f_p = bench.received[: bench.layout.trainable]

    class Pulled(Local[LSSOptions]):
        def correct(self, bench: Bench) -> None:
            bench.gradient.add_(bench.weights - f_p, alpha=2.0)

    for piece in Pulled(CONTEXT, LSSOptions()).train(bench):
        bench.run(piece)
    torch.testing.assert_close(first, bench.weights, rtol=1e-9, atol=1e-12)
    assert float((first - f_p).norm()) > 0.01


# affinity and diversity


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
    local.correct(bench)
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
    local.correct(bench)
    assert float(bench.gradient @ rows[-1]) > 0, "the gradient points outwards, so a step leads back"


@pytest.mark.parametrize("distance", ["l2", "squared"])
def test_at_its_birth_the_first_member_is_neither_pulled_nor_pushed(distance: str) -> None:
    bench, local = seat(), soup(models=1, distance=distance)
    next(local.train(bench))
    bench.scratch["rows"][-1].zero_()
    bench.gradient.zero_()
    local.correct(bench)
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


# how long, and with what


@given(st.integers(0, 7), st.integers(1, 6), st.integers(1, 45))
@settings(deadline=None, max_examples=25)
def test_shared_epochs_are_the_work_of_fedavg(epochs: int, models: int, count: int) -> None:
    bench = seat(count=count, epochs=epochs)
    grow(soup(models=models, share=True), bench)
    assert bench.steps == epochs * -(-count // 10)
    bench = seat(count=count, epochs=epochs)
    grow(soup(models=models), bench)
    assert bench.steps == models * epochs * -(-count // 10)


def test_members_may_have_epochs_or_steps_of_their_own() -> None:
    for options, steps in (({"epochs": 2}, 24), ({"steps": 5}, 15), ({"epochs": 1, "first_epochs": 3}, 20)):
        bench = seat(epochs=4)
        grow(soup(models=3, **options), bench)
        assert bench.steps == steps


@pytest.mark.parametrize(("new", "made"), [(True, 3), (False, 1)])
def test_each_member_has_its_own_optimiser_if_asked(new: bool, made: int) -> None:
    bench, seen = seat(momentum=0.9), []
    grow(soup(models=3, new_optimizer=new), bench, lambda i: seen.append(bench.optimizer))
    assert len({id(optimizer) for optimizer in seen}) == made


# batch norm


@pytest.mark.parametrize("options", [{}, {"include_init": False}])
def test_there_is_one_set_of_statistics_which_every_step_updates(options: dict[str, Any]) -> None:
    bench = seat(module=network(nn.BatchNorm1d(4)))
    grow(soup(models=3, **options), bench)
    named = bench.layout.state_dict(bench.row)
    assert int(named["2.num_batches_tracked"]) == bench.steps == 12
    assert not torch.equal(named["2.running_mean"], torch.zeros(4, dtype=torch.float64))


def test_its_own_estimate_is_that_of_the_run() -> None:
    rows = {}
    for name, options, run in (("own", {"estimate": True}, "running"), ("run", {}, "estimated"), ("no", {}, "running")):
        bench = seat(module=network(nn.BatchNorm1d(4)), statistics=run)
        grow(soup(models=2, **options), bench)
        bench.finish()
        rows[name] = bench.row.clone()
    assert torch.equal(rows["own"], rows["run"])
    assert not torch.equal(rows["own"], rows["no"])


# the contract


@pytest.mark.parametrize("options", [AUTHORS, {"share": True, "first_alone": True, "estimate": True, "distance": "l2"}])
def test_conformance_with_other_options(options: dict[str, Any]) -> None:
    check_method("lss", {"lss": options})


def test_it_composes_with_a_server_that_keeps_many_models() -> None:
    finished = small_run("fedcross+lss", {"lss": {"models": 2}}, rounds=8, model=plain_network, epochs=2)
    losses = [record["loss"] for record in finished.records]
    assert losses[-1] < 0.9 * losses[0]
