"""Tests of the batch queue, and of how captured graphs combine steps."""

from itertools import accumulate, groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import InputTransform, Samples
from fedloom.engines.cuda import batch_queue, slot
from fedloom.engines.cuda import slot as slot_module
from fedloom.engines.cuda.batch_queue import BatchQueue
from fedloom.testing.fixtures import build_small_run

CPU = torch.device("cpu")
HALF = InputTransform((0.5, 0.5), (0.25, 0.25))


def images(count: int) -> Samples:
    draw = torch.Generator().manual_seed(count)
    x = torch.randint(0, 256, (count, 3, 4, 2), dtype=torch.uint8, generator=draw)
    return Samples(x, torch.arange(count))


def make(channels_last: bool = False) -> BatchQueue:
    return BatchQueue(CPU, lambda x: HALF(x, channels_last=channels_last), channels_last=channels_last)


@given(
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=7), min_size=1, max_size=9),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([1, 1000, 1 << 20]),
)
@settings(max_examples=100, deadline=None)
def test_batches_come_in_order_as_they_would_be_prepared_one_by_one(
    batches: list[list[int]], batch_size: int, channels_last: bool, taken: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_queue, "TAKEN_BYTES", taken)
        check_batches(batches, batch_size, make(channels_last), channels_last)


def check_batches(batches: list[list[int]], batch_size: int, held: BatchQueue, channels_last: bool) -> None:
    store = images(40)
    largest = max(map(len, batches))
    room = held.allocate(store, largest, batch_size if batch_size >= largest else 0)
    assert room >= 1
    for low in range(0, len(batches), room):
        part = [np.array(batch) for batch in batches[low : low + room]]
        held.fill(store, part)
        number = low
        for size, alike in groupby(part, key=len):
            stretch = list(alike)
            turns, losses = held.queue_indices(len(stretch)), []
            for positions, batch in zip(stretch, held.take(size, turns), strict=True):
                wanted = HALF(store.x[torch.from_numpy(positions)], channels_last=channels_last)
                assert torch.equal(batch.x, wanted)
                assert batch.x.stride() == wanted.stride(), "kernels are chosen by it"
                assert batch.x.data_ptr() % 16 == 0, "and by this"
                assert batch.y.tolist() == positions.tolist()
                losses.append(torch.tensor(float(number)))
                number += 1
            held.record_losses(turns, losses)
        assert held.losses(0, len(part)).tolist() == [float(low + number) for number in range(len(part))]


def test_one_room_serves_clients_of_all_sizes() -> None:
    """A recording knows addresses and widths, so these must not change from client to client."""
    store, held = images(40), make()
    held.allocate(store, 8, 8)
    before = [(place.data_ptr(), place.shape, place.stride()) for place in held.graph_tensors]
    for largest in (3, 8, 1):
        held.allocate(store, largest, 8)
        held.fill(store, [np.arange(largest)])
        assert [(place.data_ptr(), place.shape, place.stride()) for place in held.graph_tensors] == before


def test_whole_clients_as_batches_share_the_memory() -> None:
    store, held = images(40), make()
    held.allocate(store, 30, 0)
    before = held.graph_tensors[0].data_ptr()
    held.allocate(store, 7, 0)
    assert held.graph_tensors[0].data_ptr() == before
    held.fill(store, [np.arange(7), np.arange(7, 14)])
    first = next(held.take(7, held.queue_indices(1)))
    held.record_losses(held.queue_indices(1), [torch.zeros(())])
    assert first.y.tolist() == list(range(7))
    assert next(held.take(7, held.queue_indices(1))).y.tolist() == list(range(7, 14))


def test_a_batch_that_is_larger_than_the_room_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "BATCH_QUEUE_BYTES", 200)
    store, held = images(40), make()
    assert held.allocate(store, 40, 0) == 1
    held.fill(store, [np.arange(40)])
    assert torch.equal(next(held.take(40, held.queue_indices(1))).x, HALF(store.x))


def test_a_loss_is_kept_as_it_was() -> None:
    """Losses of some steps are noted together, and whoever made them may go on with them meanwhile."""
    weight, room = torch.ones(2, requires_grad=True), torch.zeros(())
    made = [weight.sum(), room, weight.sum().add_(1), (weight * 2)[0]]
    kept = [slot_module._detach_loss(loss) for loss in made]
    room.add_(7)
    assert [float(loss) for loss in kept] == [2, 0, 3, 2]
    assert kept[0].data_ptr() == made[0].data_ptr(), "usually it costs nothing"
    assert not any(loss.requires_grad for loss in kept)


def test_little_room_is_filled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "BATCH_QUEUE_BYTES", 4 * 5 * 24 * 3)
    assert make().allocate(images(40), 5, 5) == 3


@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=100, deadline=None)
def test_stretches_are_all_steps_in_order(sizes: list[int], longest: int) -> None:
    before, slot.STEPS_PER_GRAPH = slot.STEPS_PER_GRAPH, longest
    try:
        found = list(slot._stretches(sizes))
    finally:
        slot.STEPS_PER_GRAPH = before
    assert [size for size, count in found for _ in range(count)] == sizes
    assert found[0][1] == 1, "the first is looked at more closely"
    assert max(count for _, count in found) <= longest
    starts = accumulate((count for _, count in found), initial=0)
    for start, (size, count) in zip(starts, found, strict=False):
        assert sizes[start : start + count] == [size] * count
    alike = [7] * (1 + 2 * 8 + 4 + 1)
    assert [count for _, count in slot._stretches(alike)] == [1, 8, 8, 4, 1]


def test_clients_may_have_targets_of_different_shapes() -> None:
    """They are brought where the last client's were, unless they are of another sort."""
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        bench = slot.CudaSlot(plain.engine.context, CPU)
        for shape in ((4, 3), (4, 1), (4,), (2, 3)):
            samples = Samples(torch.randn(shape[0], 64), torch.randn(shape))
            brought = bench.copy_samples(samples)
            assert torch.equal(brought.x[: shape[0]], samples.x)
            assert torch.equal(brought.y[: shape[0]], samples.y)
