"""The bench: which batches a client sees, what a pass does to its row, and how scores add up."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import bench as bench_module
from fedloom.bench import Batch, Bench, Pass, Score, Workshop, score_chunks
from fedloom.data import Augment, Federation, Prepare, Samples
from fedloom.engines.base import Homes, Shop, train_client
from fedloom.rows import Layout, digest
from fedloom.streams import Streams
from fedloom.training import Training


def numbered(count: int, features: int = 3) -> Samples:
    """Samples whose first feature is their number."""
    x = torch.arange(count, dtype=torch.float32).view(-1, 1).repeat(1, features)
    return Samples(x, torch.arange(count) % 2)


def make_bench(
    module: nn.Module | None = None, *, seed: int = 0, augment: Augment | None = None, **options: Any
) -> Bench:
    torch.manual_seed(0)
    module = module or nn.Linear(3, 2)
    return Bench(
        Workshop(
            module=module,
            layout=Layout.of(module),
            criterion=F.cross_entropy,
            prepare=Prepare.identity(),
            training=Training(**options),
            streams=Streams(seed),
            classes=2,
            augment=augment,
        )
    )


def begin(bench: Bench, samples: Samples, round: int = 0, client: int = 0) -> Bench:
    """Lay out a client's work, always from the same model."""
    start = bench.layout.empty()
    start[: bench.layout.trainable] = torch.linspace(-0.5, 0.5, bench.layout.trainable)
    start[bench.layout.trainable : bench.layout.floats] = 1.0
    bench.begin(round, client, samples, bench.layout.empty(), start, {}, {}, {}, True)
    return bench


def seen(bench: Bench, **stretch: int) -> list[list[int]]:
    """The numbers of the samples in each batch of one pass."""
    batches: list[list[int]] = []

    def look(_: Bench, batch: Batch) -> Tensor:
        batches.append(batch.x[:, 0].int().tolist())
        assert torch.equal(batch.y, batch.x[:, 0].long() % 2), "labels stay with their samples"
        return torch.zeros(())

    bench.run(Pass(look, **stretch))
    return batches


def sgd(bench: Bench, batch: Batch) -> Tensor:
    loss = bench.loss(batch)
    bench.backward(loss)
    bench.descend()
    return loss


# batches


@given(st.integers(1, 23), st.integers(0, 30), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_an_epoch_covers_every_sample_once(count: int, batch_size: int, epochs: int) -> None:
    bench = begin(make_bench(batch_size=batch_size, epochs=epochs), numbered(count))
    batches = seen(bench)
    size = min(batch_size or count, count)
    per_epoch = -(-count // size)
    assert len(batches) == bench.steps == epochs * per_epoch
    for epoch in range(epochs):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(batch) for batch in mine[:-1]] == [size] * (per_epoch - 1)
        assert len(mine[-1]) == count - size * (per_epoch - 1), "the last batch holds what is left"
        assert sorted(number for batch in mine for number in batch) == list(range(count))


def test_epochs_are_shuffled_anew() -> None:
    batches = seen(begin(make_bench(batch_size=0, epochs=3), numbered(50)))
    assert len({tuple(batch) for batch in batches}) == 3
    assert list(range(50)) not in batches


@given(st.integers(1, 11), st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_steps_are_the_beginning_of_as_many_epochs(count: int, batch_size: int, steps: int) -> None:
    long = seen(begin(make_bench(batch_size=batch_size, epochs=10), numbered(count)))
    by_run = seen(begin(make_bench(batch_size=batch_size, epochs=1, steps=steps), numbered(count)))
    by_pass = seen(begin(make_bench(batch_size=batch_size), numbered(count)), steps=steps)
    assert by_run == by_pass == long[:steps]


def test_a_pass_may_ask_for_its_own_epochs_whatever_the_run_says() -> None:
    bench = begin(make_bench(batch_size=2, epochs=5, steps=7), numbered(4))
    assert len(seen(bench, epochs=1)) == 2
    assert len(seen(bench, steps=3)) == 3
    assert len(seen(bench)) == 7
    assert seen(bench, epochs=0) == []
    assert bench.steps == 12


def test_batches_depend_on_seed_round_and_client_alone() -> None:
    def order(seed: int, round: int, client: int) -> list[list[int]]:
        bench = make_bench(seed=seed, batch_size=7)
        begin(bench, numbered(9), 5, 5)
        seen(bench)
        torch.rand(3)
        return seen(begin(bench, numbered(30), round, client))

    assert order(1, 2, 3) == order(1, 2, 3)
    others = [order(1, 2, 3), order(2, 2, 3), order(1, 3, 3), order(1, 2, 4)]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])


@pytest.mark.parametrize("chunk", [1, 100, 1 << 30])
def test_batches_do_not_depend_on_how_they_are_gathered(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = seen(begin(make_bench(batch_size=4, epochs=3), numbered(18)))
    monkeypatch.setattr(bench_module, "CHUNK_BYTES", chunk)
    bench = begin(make_bench(batch_size=4, epochs=3), numbered(18))
    assert seen(bench) == usual


def test_a_client_without_samples_does_nothing() -> None:
    bench = begin(make_bench(), numbered(0))
    bench.run(Pass(sgd))
    bench.run(Pass(sgd, steps=5))
    assert bench.samples == bench.steps == 0
    assert torch.equal(bench.row, bench.received)
    assert np.isnan(bench.mean_loss)


# training


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"optimizer": "adam", "lr": 0.01},
        {"clip": 0.1},
        {"lr_decay": 0.5},
    ],
)
def test_training_equals_a_plain_torch_loop(options: dict[str, Any]) -> None:
    samples = Samples(torch.randn(10, 3), torch.arange(10) % 2)
    bench = begin(make_bench(batch_size=4, epochs=2, **options), samples, round=2, client=1)
    bench.run(Pass(sgd))

    training, module = bench.training, nn.Linear(3, 2)
    layout = Layout.of(module)
    layout.bind(module, torch.linspace(-0.5, 0.5, layout.size))
    made: dict[str, Any] = {"lr": training.lr_at(2), "weight_decay": training.weight_decay}
    optimizer: torch.optim.Optimizer
    if training.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), **made)
    else:
        optimizer = torch.optim.SGD(module.parameters(), momentum=training.momentum, nesterov=training.nesterov, **made)
    order = Streams(0).numpy("batches", 2, 1)
    for _ in range(2):
        for index in torch.from_numpy(order.permutation(10)).split(4):
            optimizer.zero_grad()
            F.cross_entropy(module(samples.x[index]), samples.y[index]).backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip)
            optimizer.step()
    assert torch.allclose(bench.row, layout.read(module), rtol=1e-6, atol=1e-7)


def test_restart_goes_back_to_the_received_model_and_the_same_batches() -> None:
    bench = begin(make_bench(batch_size=3, momentum=0.9), numbered(10))
    bench.run(Pass(sgd))
    first, loss = bench.row.clone(), bench.mean_loss
    assert not torch.equal(first, bench.received)
    bench.run(Pass(sgd, epochs=1))
    bench.module.eval()
    bench.restart()
    assert torch.equal(bench.row, bench.received)
    assert bench.steps == 0
    assert np.isnan(bench.mean_loss)
    bench.run(Pass(sgd))
    assert torch.equal(bench.row, first)
    assert bench.mean_loss == loss


def test_a_client_does_not_see_what_the_one_before_did() -> None:
    alone = begin(make_bench(momentum=0.9), numbered(9), client=2)
    alone.run(Pass(sgd))
    shared = begin(make_bench(momentum=0.9), numbered(30), client=1)
    shared.scratch["left"] = torch.ones(1)
    shared.run(Pass(sgd))
    begin(shared, numbered(9), client=2)
    assert shared.scratch == {}
    shared.run(Pass(sgd))
    assert torch.equal(shared.row, alone.row)
    assert shared.mean_loss == alone.mean_loss


def test_mean_loss_is_that_of_the_last_epoch() -> None:
    bench = begin(make_bench(batch_size=4), numbered(10))
    losses = iter([9.0, 9.0, 9.0, 1.0, 2.0, 4.0])
    bench.run(Pass(lambda *_: torch.tensor(next(losses)), epochs=2))
    assert bench.mean_loss == pytest.approx((4 * 1 + 4 * 2 + 2 * 4) / 10)
    losses = iter([5.0])
    bench.run(Pass(lambda *_: torch.tensor(next(losses)), steps=1))
    assert bench.mean_loss == 5.0
    bench.run(Pass(sgd, epochs=0))
    assert bench.mean_loss == 5.0, "a pass without steps has no epoch"


class TwoHeads(nn.Module):
    """Only one head takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.idle = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.body(x))


def test_a_layer_without_gradient_has_gradient_zero() -> None:
    bench = begin(make_bench(TwoHeads(), batch_size=5, epochs=1), numbered(5))
    bench.gradient.fill_(float("nan"))
    bench.run(Pass(sgd))
    views = {e.name: e.view(bench.gradient) for e in bench.layout.entries}
    assert bool((views["idle.weight"] == 0).all())
    assert bool((views["idle.bias"] == 0).all())
    assert bool(views["used.weight"].abs().sum() > 0)
    rows = {e.name: (e.view(bench.row), e.view(bench.received)) for e in bench.layout.entries}
    assert torch.equal(*rows["idle.weight"])
    assert not torch.equal(*rows["used.weight"])


# batch norm


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_batch_of_one_leaves_batch_norm_statistics_alone() -> None:
    bench = begin(make_bench(normed(), batch_size=4, epochs=1), numbered(1))
    floats = slice(bench.layout.trainable, bench.layout.size)
    bench.run(Pass(sgd))
    assert torch.equal(bench.row[floats], bench.received[floats])
    assert not torch.equal(bench.weights, bench.received[: bench.layout.trainable]), "it still learns"
    assert bench.layout.is_finite(bench.row)
    assert bench.module.training
    assert all(module.training for module in bench.module.modules())


def test_only_the_lonely_batch_is_without_statistics() -> None:
    bench = begin(make_bench(normed(), batch_size=4, epochs=1), numbered(9))
    bench.run(Pass(sgd))
    assert int(bench.layout.state_dict(bench.row)["1.num_batches_tracked"]) == 2


def test_a_norm_that_its_model_keeps_in_evaluation_stays_there() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[1].eval()
            return self

    module = Frozen(*normed())
    bench = begin(make_bench(module, batch_size=4, epochs=2), numbered(9))
    bench.run(Pass(sgd))
    assert not module[1].training
    assert int(module[1].num_batches_tracked) == 0


def test_a_failed_step_does_not_spoil_the_next_client() -> None:
    bench = begin(make_bench(normed(), batch_size=1), numbered(2))

    def fail(*_: object) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        bench.run(Pass(fail))
    begin(bench, numbered(8))
    assert all(module.training for module in bench.module.modules())


# randomness


def images(count: int) -> Samples:
    """The same image many times: what differs between batches is what was drawn for them, not their order."""
    image = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return Samples(image.repeat(count, 1, 1, 1), torch.zeros(count, dtype=torch.int64))


def test_augmentation_draws_are_keyed() -> None:
    def inputs(seed: int, round: int, client: int) -> Tensor:
        module = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
        bench = make_bench(module, seed=seed, augment=Augment(crop=True, flip=True), batch_size=0, epochs=1)
        begin(bench, images(8), round, client)
        taken: list[Tensor] = []
        bench.run(Pass(lambda _, batch: taken.append(batch.x) or torch.zeros(())))
        bench.restart()
        bench.run(Pass(lambda _, batch: taken.append(batch.x) or torch.zeros(())))
        assert torch.equal(taken[0], taken[1]), "restart brings the same draws"
        assert not torch.equal(taken[0], images(8).x)
        return taken[0]

    before = torch.get_rng_state()
    first = inputs(0, 1, 1)
    torch.set_rng_state(before)
    torch.rand(7)
    assert torch.equal(inputs(0, 1, 1), first)
    assert not torch.equal(inputs(1, 1, 1), first)
    assert not torch.equal(inputs(0, 2, 1), first)
    assert not torch.equal(inputs(0, 1, 2), first)


def train(bench: Bench) -> Iterator[Pass]:
    yield Pass(sgd)


def client_row(round: int, client: int, before: int = 0, **options: Any) -> str:
    """The digest of what `train_client` returns for a model with dropout, after `before` other draws and clients.

    All samples are alike, so that the order of the batches makes no difference.
    """
    bench = make_bench(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), **options)
    part = (torch.ones(12, 3), torch.zeros(12, dtype=torch.int64))
    federation = Federation.from_arrays([part] * 4, classes=2)
    shop = Shop(bench._shop, federation, train, Homes({}, torch.float32))
    received = torch.linspace(-0.5, 0.5, bench.layout.size)
    row = bench.layout.empty()
    torch.rand(before + 1)
    for other in [*range(before), client]:
        train_client(bench, shop, round, other, row, received, {}, {}, {}, True)
    return digest(row)


def test_dropout_is_keyed_through_train_client() -> None:
    first = client_row(1, 2)
    assert client_row(1, 2, before=2) == first
    assert client_row(1, 3) != first
    assert client_row(2, 2) != first
    assert client_row(1, 2, seed=1) != first


def test_train_client_leaves_the_global_generator_alone() -> None:
    bench = make_bench(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    federation = Federation.from_arrays([(numbered(12).x, numbered(12).y)], classes=2)
    shop = Shop(bench._shop, federation, train, Homes({}, torch.float32))
    received = torch.linspace(-0.5, 0.5, bench.layout.size)
    kept, row, before = received.clone(), bench.layout.empty(), torch.get_rng_state()
    samples, loss, steps = train_client(bench, shop, 0, 0, row, received, {}, {}, {}, True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(received, kept), "the received model is not to be changed"
    assert (samples, steps) == (12, 2)
    assert np.isfinite(loss)


def test_results_put_elsewhere_are_brought_to_their_place() -> None:
    def replacing(bench: Bench) -> Iterator[Pass]:
        yield Pass(sgd)
        bench.row = torch.full_like(bench.row, 3.0)
        bench.home = {"h": torch.ones(2)}
        bench.uploads["u"] = torch.full((1,), 5.0)

    bench = make_bench()
    federation = Federation.from_arrays([(numbered(4).x, numbered(4).y)], classes=2)
    shop = Shop(bench._shop, federation, replacing, Homes({}, torch.float32))
    row, home, uploads = bench.layout.empty(), {"h": torch.zeros(2)}, {"u": torch.zeros(1)}
    kept_home, kept_upload = home["h"], uploads["u"]
    train_client(bench, shop, 0, 0, row, torch.zeros(bench.layout.size), {}, home, uploads, True)
    assert bool((row == 3).all())
    assert kept_home.tolist() == [1, 1]
    assert kept_upload.tolist() == [5]


@pytest.mark.parametrize(
    ("group", "value", "complaint"),
    [
        ("home", {"other": torch.zeros(2)}, r"home holds \['other'\], but \['h'\] was declared"),
        ("home", {"h": torch.zeros(3)}, r"home\['h'\] has shape \(3,\), but \(2,\) was expected"),
        ("row", torch.zeros(1), r"row has shape \(1,\)"),
    ],
)
def test_results_of_another_shape_are_refused(group: str, value: Any, complaint: str) -> None:
    def misplacing(bench: Bench) -> Iterator[Pass]:
        yield Pass(sgd)
        setattr(bench, group, value)

    bench = make_bench()
    federation = Federation.from_arrays([(numbered(4).x, numbered(4).y)], classes=2)
    shop = Shop(bench._shop, federation, misplacing, Homes({}, torch.float32))
    start, home = torch.zeros(bench.layout.size), {"h": torch.zeros(2)}
    with pytest.raises(ValueError, match=complaint):
        train_client(bench, shop, 0, 0, bench.layout.empty(), start, {}, home, {}, True)


# scores


def test_score_is_what_the_model_does_in_evaluation() -> None:
    bench = make_bench(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9)))
    samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
    row = torch.randn(bench.layout.size)
    score = bench.score(row, samples)
    weight, bias = row[:6].view(2, 3), row[6:8]
    output = samples.x @ weight.t() + bias
    right = output.argmax(1) == samples.y
    assert score.accuracy == pytest.approx(right.float().mean().item())
    assert score.loss == pytest.approx(F.cross_entropy(output, samples.y).item(), rel=1e-5)
    assert score.seen.tolist() == [10, 10]
    assert score.hits.tolist() == [int(right[::2].sum()), int(right[1::2].sum())]
    assert score.count == 20


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any))
@settings(deadline=None, max_examples=30)
def test_scores_add_up_however_the_samples_are_cut(sizes: list[int]) -> None:
    bench = make_bench()
    total = sum(sizes)
    generator = torch.Generator().manual_seed(total)
    samples = Samples(torch.randn(total, 3, generator=generator), torch.randint(2, (total,), generator=generator))
    row = torch.randn(bench.layout.size, generator=generator)
    whole = bench.score(row, samples)
    ends = np.cumsum([0, *sizes])
    pieces = [bench.score(row, samples[a:b]) for a, b in pairwise(ends) if b > a]
    forward, backward = sum(pieces[1:], start=pieces[0]), sum(pieces[-2::-1], start=pieces[-1])
    for score in (forward, backward):
        assert score.count == total
        assert np.array_equal(score.hits, whole.hits)
        assert np.array_equal(score.seen, whole.seen)
        assert score.accuracy == whole.accuracy
        assert score.loss == pytest.approx(whole.loss, rel=1e-5)


@given(st.integers(0, 1700))
@settings(deadline=None, max_examples=30)
def test_score_chunks_cover_the_test_set_in_order(count: int) -> None:
    test = Samples(torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64))
    covered = [index for chunk in score_chunks(test) for index in range(count)[chunk]]
    assert covered == list(range(count))


def test_a_score_without_classes_has_no_accuracy() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert Score(6.0, 3, none, none).accuracy is None
    assert Score(6.0, 3, none, none).loss == 2.0


def test_scoring_between_clients_does_not_change_training() -> None:
    bench = begin(make_bench(normed()), numbered(8), client=1)
    bench.run(Pass(sgd))
    alone = bench.row.clone()
    bench.score(torch.ones_like(alone), numbered(4))
    begin(bench, numbered(8), client=1)
    bench.run(Pass(sgd))
    assert torch.equal(bench.row[: bench.layout.floats], alone[: bench.layout.floats])
