"""Sites and a relay in one process, over a network that tests can alter."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from fedloom.core.rng import RngStreams
from fedloom.flower.secure_recombination.crypto import CryptoRejected, CryptoTerms, LayerKeyPair
from fedloom.flower.secure_recombination.participant import ExchangeParticipant, run_participant_stage
from fedloom.flower.secure_recombination.relay import MissingRelayMessage, Relay, RelayMessage, RelayOutcome
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import (
    LayerExchangeClient,
    LayerExchangeRng,
    layer_exchange_stream_name,
    run_layer_exchange,
)

RUN = "ab" * 16
STAGES = ("offer", "answer", "lock", "commit", "release")
"""Those after hello."""

Meddle = Callable[[str, int, RelayMessage], RelayMessage | MissingRelayMessage]
"""(stage, slot, what passes) -> what arrives."""


@cache
def identity(number: int) -> Identity:
    return Identity.new()


@cache
def roster(count: int) -> SiteKeys:
    return SiteKeys.parse("".join(identity(number).public_line(f"site-{number}") for number in range(count)))


def layers_of(slot: int, sizes: tuple[int, ...], seed: int = 0) -> list[bytes]:
    """Layers of floats, each unlike any other."""
    draw = np.random.default_rng([seed, slot])
    return [draw.normal(size=size // 4).astype(np.float32).tobytes() for size in sizes]


class World:
    """`count` sites, one slot each. `down` and `up` meddle with what passes; `seen` is all that the relay ever had."""

    def __init__(
        self,
        count: int,
        sizes: tuple[int, ...] = (64, 32, 128),
        seed: int = 0,
        chance: float = 0.5,
        mixed: bool = False,
        round: int = 0,
        fewest: int = 2,
        draws: Callable[[int], Callable[[int, int], LayerExchangeRng]] | None = None,
    ) -> None:
        self.key = LayerKeyPair()
        self.terms = CryptoTerms(sizes, chance, mixed, self.key.public)
        self.seed, self.round, self.count = seed, round, count
        self.layers = {slot: layers_of(slot, sizes, seed + 1000 * round) for slot in range(count)}
        self.sites = {
            slot: ExchangeParticipant(
                identity(slot),
                roster(count),
                RUN,
                round,
                slot,
                self.layers[slot],
                self.terms,
                (draws or self.seeded)(slot),
                fewest,
            )
            for slot in range(count)
        }
        self.down: Meddle = lambda stage, slot, note: note
        self.up: Meddle = lambda stage, slot, note: note
        self.seen: list[tuple[str, str, int, RelayMessage]] = []
        self.said: list[str] = []
        """Every refusal of a site."""

    def seeded(self, slot: int) -> Callable[[int, int], LayerExchangeRng]:
        return lambda attempt, exchange: stream(self.seed, self.round, slot, attempt, exchange)

    def ask(self, stage: str, questions: Mapping[int, RelayMessage]) -> dict[int, RelayMessage | MissingRelayMessage]:
        answers: dict[int, RelayMessage | MissingRelayMessage] = {}
        for slot, question in questions.items():
            self.seen.append(("down", stage, slot, question))
            arrived = self.down(stage, slot, question)
            if isinstance(arrived, MissingRelayMessage):
                answers[slot] = arrived
                continue
            answers[slot] = self.up_from(stage, slot, self.served(stage, slot, arrived))
        return answers

    def served(self, stage: str, slot: int, question: RelayMessage) -> RelayMessage | MissingRelayMessage:
        try:
            return run_participant_stage(self.sites[slot], stage, question)
        except CryptoRejected as error:
            self.said.append(str(error))
            return MissingRelayMessage(str(error), refused=True)

    def up_from(
        self, stage: str, slot: int, answer: RelayMessage | MissingRelayMessage
    ) -> RelayMessage | MissingRelayMessage:
        if isinstance(answer, RelayMessage):
            self.seen.append(("up", stage, slot, answer))
            return self.up(stage, slot, answer)
        return answer

    def run(self) -> RelayOutcome:
        greetings = self.ask("hello", {slot: RelayMessage({"attempt": 0}) for slot in self.sites})
        return Relay(self.ask, RUN, self.round, self.terms, self.key).exchange(greetings)


class Gone:
    """Sites that go at a stage, before they have read the question or after they have answered it in vain."""

    def __init__(self, world: World, when: dict[int, tuple[str, int, bool]]) -> None:
        self.when, self.world, self.asked = when, world, dict[tuple[str, int], int]()
        self.gone: set[int] = set()
        world.down, world.up = self.down, self.up

    def down(self, stage: str, slot: int, note: RelayMessage) -> RelayMessage | MissingRelayMessage:
        times = self.asked[stage, slot] = self.asked.get((stage, slot), -1) + 1
        if slot in self.when:
            leaves, at, heard = self.when[slot]
            if (leaves, at) == (stage, times) and not heard:
                self.gone.add(slot)
        return MissingRelayMessage("did not answer within 1 s") if slot in self.gone else note

    def up(self, stage: str, slot: int, note: RelayMessage) -> RelayMessage | MissingRelayMessage:
        if slot in self.when:
            leaves, at, heard = self.when[slot]
            if (leaves, at) == (stage, self.asked[stage, slot]) and heard:
                self.gone.add(slot)
        return MissingRelayMessage("did not answer within 1 s") if slot in self.gone else note


def traces(layer: bytes) -> list[bytes]:
    """Pieces of a layer as one might find them: as they are, in other byte orders, in other precisions."""
    values = np.frombuffer(layer, np.float32)
    wide = [values, values.byteswap(), values.astype(np.float64), values.astype(np.float64).byteswap()]
    narrow = [values.astype(np.float16), torch.from_numpy(values.copy()).bfloat16().view(torch.uint8).numpy()]
    bare = [np.frombuffer(form.tobytes(), np.uint8) for form in [*wide, *narrow]]
    mantissas = np.frombuffer(layer, np.uint8).reshape(-1, 4)[:, 1:3]  # less the sign, the exponent and the last bits
    return [form.tobytes()[at : at + 8] for form in [*bare, mantissas] for at in range(0, form.size - 8, 4)]


def stream(seed: int, round: int, slot: int, attempt: int = 0, number: int = 0) -> np.random.Generator:
    return RngStreams(seed).numpy(layer_exchange_stream_name(attempt, number), round, slot)


def in_process(world: World, slots: list[int], attempt: int = 0) -> dict[int, list[bytes]]:
    """What the exchange among these would come to without any network, as methods/recombination.py does it."""
    held = {slot: [torch.tensor([slot, number]) for number in range(world.terms.num_layers)] for slot in slots}
    for number in range(100):
        participants = {
            slot: LayerExchangeClient(
                client_id=slot,
                other_client_ids=[other for other in slots if other != slot],
                layers=held[slot],
                rng=stream(world.seed, world.round, slot, attempt, number),
                send_probability=world.terms.send_probability,
            )
            for slot in slots
        }
        run_layer_exchange(participants)
        held = {slot: participant.assemble() for slot, participant in participants.items()}
        whole = any(len({int(deed[0]) for deed in deeds}) == 1 for deeds in held.values())
        if not (world.terms.mixed and whole):
            break
    return {
        slot: [world.layers[int(deed[0])][number] for number, deed in enumerate(deeds)] for slot, deeds in held.items()
    }


def owners(world: World, outcome: RelayOutcome) -> dict[int, list[int]]:
    """Whose each layer of each model is. Fails on a layer that is nobody's, or stands at another's place."""
    whose = {(number, layer): slot for slot, layers in world.layers.items() for number, layer in enumerate(layers)}
    return {
        slot: [whose[number, layer] for number, layer in enumerate(layers)] for slot, layers in outcome.models.items()
    }


def assert_all_or_nothing(world: World, outcome: RelayOutcome) -> None:
    """Models from everybody who took part, each of their layers once; or none. Everybody else has a reason."""
    assert outcome.models.keys() | outcome.failed.keys() == world.layers.keys()
    assert not outcome.models.keys() & outcome.failed.keys()
    assert all(outcome.failed.values()), "and each a reason"
    found = owners(world, outcome)
    for number in range(world.terms.num_layers):
        assert sorted(owner[number] for owner in found.values()) == sorted(found), f"layer {number}"


def changed(note: RelayMessage, **parts: bytes | None) -> RelayMessage:
    """A note with other parts; None takes one away. Slashes are written as two underlines."""
    new = {**note.parts, **{name.replace("__", "/"): part for name, part in parts.items()}}
    return replace(note, parts={name: part for name, part in new.items() if part is not None})
