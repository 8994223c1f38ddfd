"""Tests of the exchange of layers as messages (FedMR, Appendix B)."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.rng import RngStreams
from fedloom.methods._support import layer_exchange
from fedloom.methods._support.layer_exchange import (
    MOST_ATTEMPTS,
    LayerExchangeClient,
    LayerExchangeMessage,
    _deliver_layers,
    exchange_layers_until_mixed,
    exchange_model_layers,
    run_layer_exchange,
)

COUNTS = st.integers(1, 6)
LAYERS = st.integers(1, 6)
CHANCES = st.floats(0, 1)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=60)

Carry = Callable[[dict[int, LayerExchangeClient], Iterable[LayerExchangeMessage]], int]


def everyone(count: int, layers: int, seed: int, chance: float = 0.5) -> dict[int, LayerExchangeClient]:
    """Participants whose layers say whose they are and which."""
    return {
        i: LayerExchangeClient(
            client_id=i,
            other_client_ids=[j for j in range(count) if j != i],
            layers=[torch.tensor([i, number]) for number in range(layers)],
            rng=RngStreams(seed).numpy("exchange", 0, i),
            send_probability=chance,
        )
        for i in range(count)
    }


def owners(participants: dict[int, LayerExchangeClient]) -> np.ndarray:
    """Whose layer each client ends with: clients x layers. Each layer must be in its place."""
    found = []
    for participant in participants.values():
        model = participant.assemble()
        assert [int(layer[1]) for layer in model] == list(range(len(participant.layers)))
        found.append([int(layer[0]) for layer in model])
    return np.array(found)


class Wire:
    """Carries messages, remembers them, and may shuffle them on the way."""

    def __init__(self, shuffle: int | None = None) -> None:
        self.seen: list[LayerExchangeMessage] = []
        self.shuffle = None if shuffle is None else random.Random(shuffle)

    def __call__(self, participants: dict[int, LayerExchangeClient], messages: Iterable[LayerExchangeMessage]) -> int:
        messages = list(messages)
        if self.shuffle is not None:
            self.shuffle.shuffle(messages)
        self.seen += messages
        return _deliver_layers(participants, messages)


@quick
@given(COUNTS, LAYERS, SEEDS, CHANCES)
def test_every_layer_instance_ends_with_exactly_one_client(count: int, layers: int, seed: int, chance: float) -> None:
    participants = everyone(count, layers, seed, chance)
    run_layer_exchange(participants)
    found = owners(participants)
    assert found.shape == (count, layers), "one instance for each client and layer"
    assert (np.sort(found, axis=0) == np.arange(count)[:, None]).all(), "and all of them are still there"


@quick
@given(COUNTS, LAYERS, SEEDS, CHANCES)
def test_messages_are_twice_the_layers_sent_and_none_is_to_oneself(
    count: int, layers: int, seed: int, chance: float
) -> None:
    participants, wire = everyone(count, layers, seed, chance), Wire()
    number = run_layer_exchange(participants, wire)
    sent = [m for m in wire.seen if not m.is_return]
    returned = [m for m in wire.seen if m.is_return]
    assert number == len(wire.seen) == 2 * len(sent)
    assert all(m.sender != m.receiver for m in wire.seen)
    assert Counter((m.sender, m.receiver, m.layer_index) for m in sent) == Counter(
        (m.receiver, m.sender, m.layer_index) for m in returned
    ), "each layer sent is answered by its receiver"
    assert max(Counter((m.sender, m.layer_index) for m in sent).values(), default=0) <= 1, "to one other client"
    assert all(int(m.payload[0]) == m.sender for m in sent), "a client offers what is its own"
    assert all(int(m.payload[1]) == m.layer_index for m in wire.seen)


@quick
@given(COUNTS, LAYERS, SEEDS, st.booleans())
def test_models_are_recombined_by_such_an_exchange_with_all_others_and_not_oneself(
    count: int, layers: int, seed: int, mixed: bool
) -> None:
    sent: list[LayerExchangeMessage] = []

    class Watched(LayerExchangeClient):
        def offer(self) -> list[LayerExchangeMessage]:
            sent.extend(messages := super().offer())
            return messages

    models = {7 + i: [torch.tensor([7 + i, n]) for n in range(layers)] for i in range(count)}
    draws = partial(RngStreams(seed).numpy, round=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_exchange, "LayerExchangeClient", Watched)
        found = exchange_model_layers(models, draws, 0.9, mixed)
    assert all(m.receiver != m.sender for m in sent)
    assert {m.receiver for m in sent} | {m.sender for m in sent} <= set(models)
    if found is None:
        assert mixed, "a single exchange always comes to something"
        assert all(exchange_layers_until_mixed(models, draws, 0.9, attempt) is None for attempt in range(MOST_ATTEMPTS))
        return
    assert list(found) == list(models)
    if mixed and count > 1:
        assert all(len({int(layer[0]) for layer in model}) > 1 for model in found.values()), "one client's model whole"
    for number in range(layers):
        assert sorted(model[number].tolist() for model in found.values()) == [[me, number] for me in models]


@quick
@given(COUNTS, LAYERS, SEEDS, CHANCES, st.integers(0, 1000))
def test_the_order_of_delivery_does_not_matter(count: int, layers: int, seed: int, chance: float, order: int) -> None:
    outcomes = []
    for wire in (Wire(), Wire(shuffle=order)):
        participants = everyone(count, layers, seed, chance)
        run_layer_exchange(participants, wire)
        outcomes.append(owners(participants))
    assert (outcomes[0] == outcomes[1]).all()


@quick
@given(st.integers(2, 6), LAYERS, SEEDS, st.randoms(use_true_random=False))
def test_nor_does_the_order_of_the_clients(count: int, layers: int, seed: int, chaos: random.Random) -> None:
    """Each draws from a generator of its own, so who goes first is all one."""
    plain, mixed = everyone(count, layers, seed), everyone(count, layers, seed)
    order = list(mixed)
    chaos.shuffle(order)
    run_layer_exchange(plain)
    run_layer_exchange({i: mixed[i] for i in order})
    assert (owners(plain) == owners(mixed)).all()


@quick
@given(LAYERS, SEEDS, CHANCES)
def test_a_client_alone_keeps_everything(layers: int, seed: int, chance: float) -> None:
    participants = everyone(1, layers, seed, chance)
    assert run_layer_exchange(participants) == 0
    assert (owners(participants) == 0).all()


@quick
@given(COUNTS, LAYERS, SEEDS)
def test_nothing_is_sent_with_probability_0(count: int, layers: int, seed: int) -> None:
    participants = everyone(count, layers, seed, 0.0)
    assert run_layer_exchange(participants) == 0
    assert (owners(participants) == np.arange(count)[:, None]).all()


@quick
@given(st.integers(2, 6), LAYERS, SEEDS)
def test_everything_is_sent_with_probability_1(count: int, layers: int, seed: int) -> None:
    participants = everyone(count, layers, seed, 1.0)
    assert run_layer_exchange(participants) == 2 * count * layers
    assert (np.sort(owners(participants), axis=0) == np.arange(count)[:, None]).all()


def test_two_clients_that_both_send_have_their_own_back() -> None:
    """A buffer with one foreign layer can only return it: always sending changes nothing between two."""
    for seed in range(20):
        participants = everyone(2, 3, seed, 1.0)
        run_layer_exchange(participants)
        assert (owners(participants) == [[0] * 3, [1] * 3]).all()


def test_by_hand() -> None:
    """Client 0 sends to 1, which keeps its own and returns either of the two."""
    outcomes = set()
    for seed in range(20):
        participants = everyone(2, 1, seed)
        participants[0].send_probability, participants[1].send_probability = 1.0, 0.0
        assert run_layer_exchange(participants) == 2
        outcomes.add(tuple(owners(participants)[:, 0].tolist()))
    assert outcomes == {(0, 1), (1, 0)}


def test_payloads_are_passed_on_and_never_changed() -> None:
    participants = everyone(4, 3, 0)
    mine = {(i, n): layer for i, p in participants.items() for n, layer in enumerate(p.layers)}
    before = {key: layer.clone() for key, layer in mine.items()}
    run_layer_exchange(participants)
    assert all(torch.equal(mine[key], before[key]) for key in mine)
    held = {id(layer) for p in participants.values() for layer in p.assemble()}
    assert held == {id(layer) for layer in mine.values()}


@quick
@given(st.integers(2, 6), LAYERS, SEEDS, CHANCES)
def test_layers_may_arrive_before_a_client_has_offered_its_own(
    count: int, layers: int, seed: int, chance: float
) -> None:
    """On a network nobody waits for the slowest to start: the outcome is the same."""
    together, one_by_one = everyone(count, layers, seed, chance), everyone(count, layers, seed, chance)
    run_layer_exchange(together)
    for participant in one_by_one.values():
        _deliver_layers(one_by_one, participant.offer())
    for participant in one_by_one.values():
        _deliver_layers(one_by_one, participant.answer())
    assert (owners(one_by_one) == owners(together)).all()


def test_whoever_lost_a_layer_on_the_way_is_told() -> None:
    participants = everyone(3, 2, 0, 1.0)
    for participant in participants.values():
        _deliver_layers(participants, participant.offer())
    with pytest.raises(RuntimeError, match="client 0 sent layer 0 away and received none in return"):
        participants[0].assemble()


def test_whoever_has_not_answered_yet_is_told() -> None:
    participants = everyone(2, 1, 0)
    participants[0].send_probability, participants[1].send_probability = 1.0, 0.0
    for participant in participants.values():
        _deliver_layers(participants, participant.offer())
    with pytest.raises(RuntimeError, match="client 1 ends with 2 instances of layer 0, not 1"):
        participants[1].assemble()


# How much is exchanged, by fixed seeds


def many(count: int, layers: int, rounds: int, chance: float = 0.5) -> np.ndarray:
    """Owners of rounds x clients x layers."""
    found = []
    for seed in range(rounds):
        participants = everyone(count, layers, seed, chance)
        run_layer_exchange(participants)
        found.append(owners(participants))
    return np.array(found)


def test_with_ten_clients_three_layers_in_ten_change_owner() -> None:
    found = many(10, 5, 200)
    changed = (found != np.arange(10)[None, :, None]).mean()
    assert 0.28 < changed < 0.33, changed


def test_half_of_the_layers_are_sent() -> None:
    messages = sum(run_layer_exchange(everyone(10, 5, seed)) for seed in range(100))
    assert 0.47 < messages / (2 * 10 * 5 * 100) < 0.53


def test_all_others_are_equally_likely_to_get_a_layer() -> None:
    wire = Wire()
    for seed in range(400):
        run_layer_exchange(everyone(4, 3, seed), wire)
    routes = Counter((m.sender, m.receiver) for m in wire.seen if not m.is_return)
    assert len(routes) == 12
    assert all(140 < times < 260 for times in routes.values()), "200 expected, with a deviation of 13"


@pytest.mark.parametrize(("count", "whole"), [(2, 0.75**5 + 0.25**5), (10, 0.7**5)])
def test_what_the_server_gets_is_seldom_one_clients_model(count: int, whole: float) -> None:
    """But sometimes it is: a model of five layers comes through whole about once in five times.

    Between two clients a layer changes places with probability 1/4, so that 0.75^5 + 0.25^5 = 24 % are whole; of ten
    clients 17 % have all their own layers still. The exchange hides whose a model is, most of the time; it does not
    promise it.
    """
    found = many(count, 5, 400 if count == 2 else 150)
    pure = (found == found[:, :, :1]).all(axis=2)
    assert abs(pure.mean() - whole) < 0.05, pure.mean()
    assert (~pure).any(axis=1).mean() > 0.7, "in most rounds some model is a mixture"


def test_layers_move_independently() -> None:
    """What one layer does says nothing about the next: else whole models would move, and stay whole."""
    moved = many(10, 2, 300) != np.arange(10)[None, :, None]
    both, first, second = (moved[:, :, 0] & moved[:, :, 1]).mean(), moved[:, :, 0].mean(), moved[:, :, 1].mean()
    assert abs(both - first * second) < 0.02


def test_layers_of_any_kind_travel() -> None:
    tensors: list[Tensor] = [torch.zeros(0), torch.tensor(3.0), torch.ones(2, 2, dtype=torch.int64)]
    participants = {
        i: LayerExchangeClient(i, [j for j in range(3) if j != i], list(tensors), np.random.default_rng(i))
        for i in range(3)
    }
    run_layer_exchange(participants)
    for participant in participants.values():
        assert [layer.shape for layer in participant.assemble()] == [layer.shape for layer in tensors]
