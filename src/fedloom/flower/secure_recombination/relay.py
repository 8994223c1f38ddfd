"""The server's side of the sealed exchange of layers: it carries messages between sites and cannot read them.

The stages are those of sealed_site.py. The relay asks every site at each of them, and passes on what it gets:

    hello -> offer -> answer -> lock -> commit -> release -> models

- Sites that do not answer hello, offer, answer or lock have dropped out. The attempt is given up and another one begun
  with those who are left, from their own untouched layers. So it is when a site refuses what it was shown; that site
  stays, because the fault may be on the way to it.
- Nobody may be missing at commit, because a site that has committed does not begin again: whoever is silent is asked
  once more. After that only those who have not committed can begin again, and where everybody has the round goes
  without their models.
- At release one answer is enough: every site has all keys. The server then opens the recombined models.

Whoever drops out, the server ends with a recombined model from every site of one attempt, or with none at all and its
own models as they were. Sealed layers can be told apart, so it also sees that each is there once; what it does not see
is whose they were.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fedloom.flower.secure_recombination.crypto import (
    EncryptionSession,
    EncryptionTerms,
    ExchangeRejected,
    KeyExchangeHello,
    LayerKeyPair,
    decrypt_model,
    split_framed_parts,
)
from fedloom.flower.secure_recombination.messages import MissingRelayMessage, RelayMessage, relay_message_parts
from fedloom.methods._support.layer_exchange import MOST, MOST_ATTEMPTS

Ask = Callable[[str, dict[int, RelayMessage]], Mapping[int, RelayMessage | MissingRelayMessage]]
"""(stage, a question for each slot) -> what came back; slots without an answer may be missing."""


@dataclass
class RelayOutcome:
    """What came of an exchange."""

    models: dict[int, list[bytes]] = field(default_factory=dict)
    """By slot: the layers of a recombined model, in the clear."""
    lost: dict[int, str] = field(default_factory=dict)
    """By slot: why there is none."""
    attempts: int = 1
    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class _Dropped(Exception):
    """An attempt cannot go on: who is missing, and why it ended."""

    def __init__(self, gone: Mapping[int, str], reason: str) -> None:
        super().__init__(reason)
        self.gone = gone


class Relay:
    """One round's exchange, run from the server."""

    def __init__(
        self, ask: Ask, run: str, round: int, terms: EncryptionTerms, key: LayerKeyPair, fewest: int = 2
    ) -> None:
        self.run, self.round, self.terms, self.key, self.fewest = run, round, terms, key, fewest
        self.result = RelayOutcome()
        self._ask = ask
        self._hellos: dict[int, KeyExchangeHello] = {}
        self._boards: dict[int, bytes] = {}

    def exchange(self, greetings: Mapping[int, RelayMessage | MissingRelayMessage]) -> RelayOutcome:
        """All stages, from the sites' first hellos on, which come with the news that they have trained."""
        result, session = self.result, EncryptionSession(self.run, self.round)
        answers: Mapping[int, RelayMessage | MissingRelayMessage] = greetings
        self._count({}, greetings)
        reason = ""
        while True:
            self._greet(session, answers)
            here = sorted(self._hellos)
            if len(here) < self.fewest:
                few = f"{len(here)} of at least {self.fewest} sites were left for the exchange"
                return self._give_up(here, f"{few}: {reason}" if reason else few)
            try:
                return self._attempt(session)
            except _Dropped as dropped:
                reason = str(dropped)
                result.lost.update(dropped.gone)
                here = [slot for slot in here if slot not in dropped.gone]
            if session.attempt + 1 == MOST_ATTEMPTS:
                return self._give_up(here, f"the exchange was given up after {MOST_ATTEMPTS} attempts: {reason}")
            session = EncryptionSession(self.run, self.round, session.attempt + 1)
            result.attempts += 1
            answers = self._asked("hello", dict.fromkeys(here, RelayMessage({"attempt": session.attempt})))

    def _attempt(self, session: EncryptionSession) -> RelayOutcome:
        here, number = sorted(self._hellos), {"attempt": session.attempt}
        everyone = {f"hello/{slot}": self._hellos[slot].encode() for slot in here}
        passed = self._passed("offer", {slot: RelayMessage(number, everyone) for slot in here})
        for exchange in range(MOST):
            self.result.exchanges += 1
            header = {**number, "exchange": exchange}
            passed = self._passed("answer", {slot: RelayMessage(header, passed[slot]) for slot in here})
            boards = relay_message_parts("board", self._boards) if exchange == 0 else {}
            for slot in here:
                passed[slot].update((name, part) for name, part in boards.items() if name != f"board/{slot}")
            locked = self._stage("lock", {slot: RelayMessage(header, passed[slot]) for slot in here})
            passed = _delivered("lock", locked)
            committed = self._commit({slot: RelayMessage(header, passed[slot]) for slot in here})
            if not any(note.by_slot("offer") for note in committed.values()):
                passed = _delivered("commit", committed)
                return self._release(
                    session, exchange, {slot: RelayMessage(header, passed[slot]) for slot in here}, locked
                )
            passed = _delivered("offer", committed)
        raise _Dropped({}, f"models were not mixed after {MOST} exchanges")

    def _greet(self, session: EncryptionSession, answers: Mapping[int, RelayMessage | MissingRelayMessage]) -> None:
        """Note who takes part; the sites check each other's hellos themselves."""
        self._hellos, self._boards = {}, {}
        for slot, answer in answers.items():
            if isinstance(answer, MissingRelayMessage):
                self.result.lost[slot] = answer.reason
                continue
            try:
                hello = KeyExchangeHello.decode(answer.parts.get("hello", b""))
                board = answer.parts.get("board", b"")
                if (hello.session, hello.slot, hello.terms) != (session, slot, self.terms.digest):
                    raise ExchangeRejected("its hello is for another exchange.")
                if len(board) != sum(self.terms.locked_sizes):
                    raise ExchangeRejected(f"its board has {len(board)} bytes, not {sum(self.terms.locked_sizes)}.")
            except ExchangeRejected as error:
                self.result.lost[slot] = f"refused: {error}"
            else:
                self._hellos[slot], self._boards[slot] = hello, board

    def _commit(self, questions: dict[int, RelayMessage]) -> dict[int, RelayMessage]:
        """Whoever is silent is asked once more: a site that has committed does not begin again."""
        answers = self._asked("commit", questions)
        silent = {slot: note for slot, note in questions.items() if _is_silent(answers.get(slot))}
        if silent:
            answers.update(self._asked("commit", silent))
        return _all_of("commit", questions, answers)

    def _release(
        self,
        session: EncryptionSession,
        exchange: int,
        questions: dict[int, RelayMessage],
        locked: Mapping[int, RelayMessage],
    ) -> RelayOutcome:
        """Unlock all models with the keys of whoever answers, and open their layers."""
        keys: dict[int, set[bytes]] = {slot: set() for slot in locked}
        for _ in range(2):
            for answer in self._asked("release", questions).values():
                if isinstance(answer, RelayMessage):
                    for slot, key in answer.by_slot("key").items():
                        keys.get(slot, set()).add(key)
            if all(keys.values()):
                break
        result, sealed = self.result, dict[int, list[bytes]]()
        for slot, note in locked.items():
            try:
                sealed[slot] = self._unlocked(session, exchange, slot, note.parts.get("model", b""), keys[slot])
            except ExchangeRejected as error:
                result.lost[slot] = f"refused: {error}"
        if twice := _twice(sealed):
            return self._give_up(list(locked), f"refused: {twice}")
        for slot, layers in sealed.items():
            try:
                result.models[slot] = [self.key.open(layer, session, number) for number, layer in enumerate(layers)]
            except ExchangeRejected as error:
                result.lost[slot] = f"refused: {error}"
        return result

    def _unlocked(
        self, session: EncryptionSession, exchange: int, slot: int, model: bytes, keys: Iterable[bytes]
    ) -> list[bytes]:
        """The layers of one model, each still in its seal."""
        who, error = self._hellos[slot].who, ExchangeRejected("no site released the key to its model.")
        for key in keys:
            try:
                opened = decrypt_model(key, model, session, exchange, who)
            except ExchangeRejected as wrong:
                error = wrong
                continue
            return split_framed_parts(opened, self.terms.sealed_sizes, f"the model of {who}")
        raise error

    def _give_up(self, slots: Iterable[int], reason: str) -> RelayOutcome:
        self.result.models.clear()
        for slot in slots:
            self.result.lost.setdefault(slot, reason)
        return self.result

    # Asking, and passing on

    def _asked(self, stage: str, questions: dict[int, RelayMessage]) -> dict[int, RelayMessage | MissingRelayMessage]:
        answers = {slot: answer for slot, answer in self._ask(stage, questions).items() if slot in questions}
        for slot in questions:
            answers.setdefault(slot, MissingRelayMessage("did not answer"))
        self._count(questions, answers)
        return answers

    def _count(
        self, questions: Mapping[int, RelayMessage], answers: Mapping[int, RelayMessage | MissingRelayMessage]
    ) -> None:
        self.result.bytes_down += sum(note.nbytes for note in questions.values())
        self.result.bytes_up += sum(note.nbytes for note in answers.values() if isinstance(note, RelayMessage))

    def _stage(self, stage: str, questions: dict[int, RelayMessage]) -> dict[int, RelayMessage]:
        return _all_of(stage, questions, self._asked(stage, questions))

    def _passed(self, stage: str, questions: dict[int, RelayMessage]) -> dict[int, dict[str, bytes]]:
        return _delivered(stage, self._stage(stage, questions))


def _is_silent(answer: RelayMessage | MissingRelayMessage | None) -> bool:
    return answer is None or (isinstance(answer, MissingRelayMessage) and not answer.refused)


def _all_of(
    stage: str, questions: Mapping[int, RelayMessage], answers: Mapping[int, RelayMessage | MissingRelayMessage]
) -> dict[int, RelayMessage]:
    """The answers, if everybody has given one. Who refuses is still there, and may take part in the next attempt."""
    notes = {slot: answer for slot, answer in answers.items() if isinstance(answer, RelayMessage)}
    faults = {slot: answer for slot, answer in answers.items() if isinstance(answer, MissingRelayMessage)}
    if not faults:
        return notes
    silent = {slot: answer.reason for slot, answer in faults.items() if not answer.refused}
    refusals = [answer.reason for answer in faults.values() if answer.refused]
    raise _Dropped(silent, (refusals or [f"slot {slot} at {stage}: {reason}" for slot, reason in silent.items()])[0])


def _delivered(stage: str, answers: Mapping[int, RelayMessage]) -> dict[int, dict[str, bytes]]:
    """What the sites wrote to each other, by receiver."""
    letters = {slot: note.by_slot(stage) for slot, note in answers.items()}
    for slot, written in letters.items():
        if written.keys() != letters.keys() - {slot}:
            raise _Dropped({slot: f"refused: it did not write to everybody at {stage}"}, f"slot {slot} at {stage}")
    return {
        receiver: {f"{stage}/{sender}": written[receiver] for sender, written in letters.items() if sender != receiver}
        for receiver in letters
    }


def _twice(models: Mapping[int, list[bytes]]) -> str:
    """What is wrong if a layer is in two models. Its seal is different each time a layer is sealed."""
    seen: dict[bytes, int] = {}
    for slot, layers in models.items():
        for number, layer in enumerate(layers):
            if (other := seen.setdefault(layer, slot)) != slot:
                return f"slots {other} and {slot} have handed over the same layer {number}."
    return ""
