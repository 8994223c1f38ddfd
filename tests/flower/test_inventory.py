"""The sites' inventory of models that the server cannot open, and what a mean tells it in spite of that: sums only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exchange_runs import federate, key_of, recorded, run_of
from fake import FakeLink
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import RUN, Gone, World, mean_of

from fedloom.flower.inventory import Entry, Inventory
from fedloom.flower.parcel import Block, Parcel
from fedloom.flower.relay_site import _known_as
from fedloom.flower.sealed import ModelsKey, Refusal, Session, digest
from fedloom.flower.starting import inventory_of, start_of
from fedloom.rounds import Rounds

SESSION = Session(RUN, 3, 1)
HASHES = st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=4).map(tuple)
ENTRIES = st.builds(
    lambda round, attempt, hashes: Entry(Session(RUN, round, attempt), hashes),
    st.integers(0, 99),
    st.integers(0, 3),
    st.one_of(st.just(()), HASHES),
)


@given(st.dictionaries(st.integers(0, 40), ENTRIES, max_size=6), st.data())
def test_only_a_site_can_have_written_it(entries: dict[int, Entry], data: st.DataObject) -> None:
    key, inventory = ModelsKey(), Inventory(RUN, entries)
    vouched = inventory.vouched(key)
    assert Inventory.read(vouched, key, RUN) == inventory
    assert vouched == Inventory(RUN, dict(reversed(entries.items()))).vouched(key), "all sites write the same"
    with pytest.raises(Refusal, match="no site of this run has vouched for the inventory"):
        Inventory.read(vouched, ModelsKey(), RUN)
    with pytest.raises(Refusal, match="the inventory is that of another run"):
        Inventory.read(vouched, key, "cd" * 16)
    with pytest.raises(Refusal, match="the inventory is that of a run with other settings"):
        Inventory.read(vouched, key, RUN, "others")
    place = data.draw(st.integers(0, len(vouched) - 1))
    changed = vouched[:place] + bytes([vouched[place] ^ data.draw(st.integers(1, 255))]) + vouched[place + 1 :]
    with pytest.raises(Refusal, match="no site of this run has vouched for the inventory"):
        Inventory.read(changed, key, RUN)


def test_a_mean_and_a_layer_do_not_pass_for_each_other() -> None:
    """Or the server could have a model in two slots."""
    key = ModelsKey()
    layer, mean = key.seal(b"layer", SESSION, 0), key.seal(b"a mean", SESSION, 0, mean=True)
    assert Entry(SESSION).open(key, mean, 0) == b"a mean"
    with pytest.raises(Refusal, match="is not sealed for this key, this round and this place"):
        Entry(SESSION).open(key, layer, 0)
    hashes = (digest(mean).hex(),)
    with pytest.raises(Refusal, match="is not sealed for this key, this round and this place"):
        Entry(SESSION, hashes).open(key, mean, 0)
    with pytest.raises(Refusal, match="layer 0 is not that of the model which the inventory has"):
        Entry(SESSION, hashes).open(key, layer, 0)


SIZES = (32, 64, 16)
LEAVING = st.tuples(st.sampled_from(("hello", "offer", "answer", "lock")), st.just(0), st.booleans())


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 5), st.integers(0, 2**32 - 1), st.data())
def test_whoever_is_missing_the_mean_is_over_all_models(count: int, seed: int, data: st.DataObject) -> None:
    """Each mean, by arithmetic of our own: what the present hand over, and what the others had before."""
    world: World | None = None
    for round in range(4):
        before, world = world, World(count, SIZES, seed, round=round, hidden=True, before=world)
        gone = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
        Gone(world, {slot: data.draw(LEAVING) for slot in gone})
        outcome = world.run()
        present = set(outcome.models)
        assert present == set(range(count)) - gone
        models = world.in_the_clear()
        assert models.keys() == set(range(count))
        averaged = models if before is not None else {slot: models[slot] for slot in present}
        assert outcome.mean == [
            mean_of([averaged[slot][number] for slot in sorted(averaged)]) for number in range(len(SIZES))
        ]
        for slot in gone:
            assert models[slot] == (before.in_the_clear()[slot] if before is not None else outcome.mean)
        # The new mean less the old one is the sum of what the present have learned since, and of nothing else.
        if before is not None:
            old = before.in_the_clear()
            for number in range(len(SIZES)):
                learned = sum(
                    np.frombuffer(world.layers[slot][number], np.float32).astype(np.float64)
                    - np.frombuffer(old[slot][number], np.float32)
                    for slot in present
                )
                less = mean_of([old[slot][number] for slot in range(count)])
                difference = np.frombuffer(outcome.mean[number], np.float32) - np.frombuffer(less, np.float32)
                np.testing.assert_allclose(difference, learned / count, rtol=1e-4, atol=1e-5)


def asked_wrongly(change: Callable[[dict[int, bytes], World], dict[int, bytes]]) -> str:
    """What a site says to a mean of the second round in which slot 2 is missing, with other layers than are due."""
    world = World(4, SIZES, hidden=True)
    world.run()
    world = World(4, SIZES, round=1, hidden=True, before=world)
    Gone(world, {2: ("hello", 0, False)})
    outcome = world.run()
    assert outcome.models.keys() == {0, 1, 3}
    layers = {slot: model[0] for slot, model in {**world.kept, **outcome.models}.items()}
    assert world.sites[0].mean(0, 0, {0: layers}).means == {0: outcome.mean[0]}
    with pytest.raises(Refusal) as refusal:
        world.sites[0].mean(0, 0, {0: change(layers, world)})
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layers, world: {k: v for k, v in layers.items() if k != 2}, "would not be that of all models"),
        (lambda layers, world: {**layers, 4: layers[0]}, "would not be that of all models"),
        (lambda layers, world: {**layers, 2: world.kept[1][0]}, "layer 0 of slot 2 is not what the inventory has"),
        (lambda layers, world: {**layers, 2: layers[1]}, "layer 0 of slot 2 is not what the inventory has"),
        (lambda layers, world: {**layers, 1: world.kept[1][0]}, "layer 0 of slot 1 is not what site-1#1 handed over"),
    ],
)
def test_a_site_averages_all_models_and_nothing_else(change: Any, words: str) -> None:
    assert words in asked_wrongly(change)


def test_sites_that_are_shown_different_inventories_do_not_exchange() -> None:
    """All but one could begin with models of an earlier round, of which the mean is known."""
    first = World(3, SIZES, hidden=True)
    first.run()
    second = World(3, SIZES, round=1, hidden=True, before=first)
    second.run()
    third = World(3, SIZES, round=2, hidden=True, before=second)
    third.sites[1] = World(3, SIZES, round=2, hidden=True, before=first).sites[1]
    outcome = third.run()
    assert outcome.models.keys() <= {0, 2}
    assert "its hello is for another exchange" in outcome.lost[1]


def test_nor_do_they_with_a_slot_that_is_none() -> None:
    world = World(3, SIZES, hidden=True)
    for site in world.sites.values():
        assert site._hidden is not None
        site._hidden = replace(site._hidden, slots=2)
    assert not world.run().models
    assert "slot 2 takes part, but there is no such model" in " ".join(world.said)


# Whole runs


class Tampering:
    """A server that sends other models than are due from the second round on."""

    def __init__(self, choose: Callable[[dict[int, Parcel], int], Parcel]) -> None:
        self.choose, self.seen = choose, dict[int, dict[int, Parcel]]()

    def __call__(self, link: FakeLink) -> None:
        send = link.send

        def tampered(node: int, parcel: Parcel, seconds: float) -> Any:
            header = parcel.header
            if parcel.kind == "mix/train" and "model" in parcel.blocks:
                kept = self.seen.setdefault(header["round"], {})
                kept[header["slot"]] = parcel
                other = self.choose(kept, header["slot"])
                blocks = {**parcel.blocks, "model": other.blocks["model"]}
                parcel = replace(parcel, blocks=blocks, header={**header, "slot": other.header["slot"]})
            return send(node, parcel, seconds)

        link.send = tampered  # type: ignore[method-assign]


def test_the_same_model_for_everybody_is_refused(certificates: Path, tmp_path: Path) -> None:
    """Where nobody learns, the mean would be that model."""
    config = run_of(rounds=2, lr_decay=1e-30)
    same = Tampering(lambda seen, slot: next(iter(seen.values())))
    finished, _ = federate(config, certificates, tmp_path, same, **key_of(certificates))
    assert [record["lost"] for record in finished.history if record["round"]] == [0, 5]


@pytest.mark.parametrize("gone", [{1: {102}, 2: {100}, 3: {101, 104}}, {1: set(), 2: {103}, 3: {103}}])
def test_who_takes_part_tells_nothing_of_models_that_nobody_has_changed(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: dict[int, set[int]]
) -> None:
    """Means over different models would make a system of equations, with the models as its solution."""
    config = run_of(rounds=4, lr_decay=1e-30, deadline=0.5, options={"fedmr": {"secure": True, "mixed": True}})
    rows: list[torch.Tensor] = []

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            missing = question.kind == "mix/train" and node in gone.get(question.header["round"], ())
            return None if missing else answer

        link.meddle = meddle

    deployed = Rounds.deployed

    def noted(rounds: Rounds) -> torch.Tensor:
        rows.append(deployed(rounds).clone())
        return rows[-1]

    monkeypatch.setattr(Rounds, "deployed", noted)
    finished, _ = federate(config, certificates, tmp_path, leave, **key_of(certificates))
    lost = [record["lost"] for record in finished.history if record["round"]]
    assert lost == [0, *(len(gone[round]) for round in (1, 2, 3))]
    means = rows[1:5]
    for later in means[1:]:
        torch.testing.assert_close(later, means[0], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(rows[0], means[0], atol=1e-3)


def test_a_run_that_loses_clients_has_the_bits_of_one_whose_server_opens_models(
    certificates: Path, tmp_path: Path
) -> None:
    """From the second exchange on: who is missing in the first goes on from the mean."""
    config = run_of(rounds=4, deadline=0.5)

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            away = question.kind == "mix/train" and (question.header["round"], node) in ((1, 102), (2, 100), (3, 104))
            return None if away else answer

        link.meddle = meddle

    digests = []
    for name, more in (("open", {}), ("hidden", key_of(certificates))):
        (tmp_path / name).mkdir()
        finished, _ = federate(config, certificates, tmp_path / name, leave, **more)
        assert [record["lost"] for record in finished.history if record["round"]] == [0, 1, 1, 1]
        digests.append(finished.summary["digest"])
    assert digests[0] == digests[1]


def test_who_is_missing_at_first_goes_on_from_the_mean(
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun_with: dict[tuple[int, int], torch.Tensor],
) -> None:
    trained, config = recorded(monkeypatch), run_of(rounds=2, deadline=0.5)

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            return None if (question.kind, question.header["round"], node) == ("mix/train", 0, 102) else answer

        link.meddle = meddle

    finished, link = federate(config, certificates, tmp_path, leave, **key_of(certificates))
    assert [record["lost"] for record in finished.history if record["round"]] == [1, 0]
    first, second = (
        {
            p.header["client"]: p.header["slot"]
            for p in link.asked
            if (p.kind, p.header["round"]) == ("mix/train", round)
        }
        for round in (0, 1)
    )
    rows = [row for round, client, row in trained if round == 0 and client != 2]
    assert len(rows) == 4
    mean = torch.stack(rows).mean(0)
    for client, slot in second.items():
        if slot == first[2]:
            torch.testing.assert_close(begun_with[1, client], mean, rtol=1e-5, atol=1e-6)
        else:
            assert not torch.allclose(begun_with[1, client], mean, atol=1e-4)
    assert len(second) == 5


def test_blocks_are_not_confused(certificates: Path, tmp_path: Path) -> None:
    """A server that leaves the inventory out, or sends one of before, gets nothing."""
    config = run_of(rounds=3)
    first: list[Block] = []

    def stale(link: FakeLink) -> None:
        send = link.send

        def sent(node: int, parcel: Parcel, seconds: float) -> Any:
            if parcel.kind == "mix/train" and "inventory" in parcel.blocks:
                if parcel.header["round"] == 1:
                    first.append(parcel.blocks["inventory"])
                elif parcel.header["round"] == 2:
                    parcel = replace(parcel, blocks={**parcel.blocks, "inventory": first[0]})
            return send(node, parcel, seconds)

        link.send = sent  # type: ignore[method-assign]

    finished, _ = federate(config, certificates, tmp_path, stale, **key_of(certificates))
    assert [record["lost"] for record in finished.history if record["round"]] == [0, 0, 5]
    assert "is not that of the model which the inventory has" in finished.history[-1]["lost_clients"]["0"]


def test_a_mean_is_one_model_however_often_it_is_sealed(certificates: Path, tmp_path: Path) -> None:
    """A client that trains it twice with other company gives away what the company learned."""
    config = run_of(rounds=2, deadline=0.5)

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            return None if (question.kind, question.header["round"], node) == ("mix/train", 0, 102) else answer

        link.meddle = meddle

    _, link = federate(config, certificates, tmp_path, leave, **key_of(certificates))
    key, site = ModelsKey.read(certificates / "models.key"), link.sites[100]
    asked = [p for p in link.asked if p.kind == "mix/train" and "model" in p.blocks]
    terms = _known_as(site, key)
    words = {}
    for question in asked:
        inventory = inventory_of(question, key, terms)
        assert inventory is not None
        other = replace(question, blocks={**question.blocks, "model": Block.raw(b"sealed anew")})
        words[question.header["slot"]] = [start_of(site, one, inventory) for one in (question, other)]
        if inventory.entries[question.header["slot"]].is_mean:
            assert words[question.header["slot"]] == ["mean"] * 2
        else:
            assert len(set(words[question.header["slot"]])) == 2
    assert sum(first == "mean" for first, _ in words.values()) == 1
