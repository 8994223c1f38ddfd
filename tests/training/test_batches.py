"""Tests of a client's batches and of the draws for augmentation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.data import Augment, Samples
from fedloom.training import trainer as bench_module
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.trainers import begin, make_bench, numbered, sgd


def seen(bench: LocalTrainer, **stretch: int) -> list[list[int]]:
    """The numbers of the samples in each batch of one pass."""
    batches: list[list[int]] = []

    def look(_: LocalTrainer, batch: Batch) -> Tensor:
        batches.append(batch.x[:, 0].int().tolist())
        assert torch.equal(batch.y, batch.x[:, 0].long() % 2), "labels stay with their samples"
        return torch.zeros(())

    bench.run_steps(LocalSteps(look, **stretch))
    return batches


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
    bench.run_steps(LocalSteps(sgd))
    bench.run_steps(LocalSteps(sgd, steps=5))
    assert bench.num_examples == bench.steps == 0
    assert torch.equal(bench.row, bench.received)
    assert np.isnan(bench.mean_loss)


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
        bench.run_steps(LocalSteps(lambda _, batch: taken.append(batch.x) or torch.zeros(())))
        bench.restart()
        bench.run_steps(LocalSteps(lambda _, batch: taken.append(batch.x) or torch.zeros(())))
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
