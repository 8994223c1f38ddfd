"""The server's relay in the secure exchange of layers.

It carries messages between sites and cannot read them.

The stages are those of participant.py. At each stage the relay asks every site, and passes on the replies:

    hello -> offer -> answer -> lock -> commit -> release -> models

- A site that does not reply at hello, offer, answer or lock has dropped out. The relay gives up the attempt and begins
  another one with the remaining sites, from their own unchanged layers. It does the same if a site refuses what it
  received. That site stays, because the fault may lie on the way to it.
- No site may be missing at commit, because a committed site does not begin again. The relay asks a silent site once
  more. After that, only sites that have not committed can begin again. If all have, the round goes on without their
  models.
- At release one reply is enough, because every site has all keys. The server then opens the recombined models.

Whoever drops out, the server ends with a recombined model from every site of one attempt, or with none and its own
models unchanged. Sealed layers differ from each other, so the server sees that each occurs once, but not whose it was.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fedloom.flower.secure_recombination.crypto import (
    CryptoHello,
    CryptoRejected,
    CryptoSession,
    CryptoTerms,
    LayerKeyPair,
    decrypt_model,
    split_crypto_parts,
)
from fedloom.methods._support.layer_exchange import MOST, MOST_ATTEMPTS


@dataclass(frozen=True)
class RelayMessage:
    """A request to a site or its reply: a header of integers and strings, and parts of bytes."""

    header: Mapping[str, int | str] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts.values())

    def by_model_index(self, kind: str) -> dict[int, bytes]:
        """Return the parts named `kind/MODEL_INDEX`."""
        found = {}
        for name, part in self.parts.items():
            before, _, model_index = name.partition("/")
            if before == kind and model_index.isascii() and model_index.isdigit():
                found[int(model_index)] = part
        return found


def relay_message_parts(kind: str, parts_by_model_index: Mapping[int, bytes]) -> dict[str, bytes]:
    """Return parts that `RelayMessage.by_model_index` reads."""
    return {f"{kind}/{model_index}": part for model_index, part in parts_by_model_index.items()}


@dataclass(frozen=True)
class MissingRelayMessage:
    """The site did not reply, or (`refused`) it replied and does not continue."""

    reason: str
    refused: bool = False


Reply = RelayMessage | MissingRelayMessage
Replies = Mapping[int, Reply]
Requests = Mapping[int, RelayMessage]
Ask = Callable[[str, Requests], Replies]
"""(stage, a request for each model index) -> the replies; those that did not come may be missing."""


@dataclass
class RelayOutcome:
    """The result of an exchange."""

    models: dict[int, list[bytes]] = field(default_factory=dict)
    """By model index: the layers of a recombined model, decrypted."""
    failed: dict[int, str] = field(default_factory=dict)
    """By model index: why the model is missing."""
    attempts: int = 1
    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class _Dropped(Exception):
    """An attempt cannot continue: who is missing, and why it ended."""

    def __init__(self, gone: Mapping[int, str], reason: str) -> None:
        super().__init__(reason)
        self.gone = gone


class Relay:
    """The exchange of one round, run by the server."""

    def __init__(
        self, ask_sites: Ask, run: str, round: int, terms: CryptoTerms, key: LayerKeyPair, min_sites: int = 2
    ) -> None:
        self.run, self.round, self.terms, self.key, self.min_sites = run, round, terms, key, min_sites
        self.result = RelayOutcome()
        self._ask_sites = ask_sites
        self._hellos: dict[int, CryptoHello] = {}
        self._boards: dict[int, bytes] = {}

    def exchange(self, hellos: Replies) -> RelayOutcome:
        """Run all stages. The sites' first `hellos` come with the results of their training."""
        result, session = self.result, CryptoSession(self.run, self.round)
        answers: Replies = hellos
        self._count({}, hellos)
        reason = ""
        while True:
            self._accept_hellos(session, answers)
            here = sorted(self._hellos)
            if len(here) < self.min_sites:
                few = f"{len(here)} of at least {self.min_sites} required sites were left for the exchange"
                return self._give_up(here, f"{few}: {reason}" if reason else few)
            try:
                return self._attempt(session)
            except _Dropped as dropped:
                reason = str(dropped)
                result.failed.update(dropped.gone)
                here = [i for i in here if i not in dropped.gone]
            if session.attempt + 1 == MOST_ATTEMPTS:
                return self._give_up(here, f"the exchange was given up after {MOST_ATTEMPTS} attempts: {reason}")
            session = CryptoSession(self.run, self.round, session.attempt + 1)
            result.attempts += 1
            answers = self._asked("hello", dict.fromkeys(here, RelayMessage({"attempt": session.attempt})))

    def _attempt(self, session: CryptoSession) -> RelayOutcome:
        here, number = sorted(self._hellos), {"attempt": session.attempt}
        everyone = {f"hello/{i}": self._hellos[i].encode() for i in here}
        passed = self._passed("offer", {i: RelayMessage(number, everyone) for i in here})
        for exchange in range(MOST):
            self.result.exchanges += 1
            header = {**number, "exchange": exchange}
            passed = self._passed("answer", {i: RelayMessage(header, passed[i]) for i in here})
            boards = relay_message_parts("board", self._boards) if exchange == 0 else {}
            for i in here:
                passed[i].update((name, part) for name, part in boards.items() if name != f"board/{i}")
            locked = self._stage("lock", {i: RelayMessage(header, passed[i]) for i in here})
            passed = _delivered("lock", locked)
            committed = self._commit({i: RelayMessage(header, passed[i]) for i in here})
            if not any(message.by_model_index("offer") for message in committed.values()):
                passed = _delivered("commit", committed)
                requests = {i: RelayMessage(header, passed[i]) for i in here}
                return self._release(session, exchange, requests, locked)
            passed = _delivered("offer", committed)
        raise _Dropped({}, f"models were not mixed after {MOST} exchanges")

    def _accept_hellos(self, session: CryptoSession, answers: Replies) -> None:
        """Store who takes part; the sites check each other's hellos themselves."""
        self._hellos, self._boards = {}, {}
        for i, answer in answers.items():
            if isinstance(answer, MissingRelayMessage):
                self.result.failed[i] = answer.reason
                continue
            try:
                hello = CryptoHello.decode(answer.parts.get("hello", b""))
                board = answer.parts.get("board", b"")
                if (hello.session, hello.model_index, hello.terms) != (session, i, self.terms.digest):
                    raise CryptoRejected("its hello is for another exchange.")
                if len(board) != sum(self.terms.locked_sizes):
                    raise CryptoRejected(f"its board has {len(board)} bytes, not {sum(self.terms.locked_sizes)}.")
            except CryptoRejected as error:
                self.result.failed[i] = f"rejected: {error}"
            else:
                self._hellos[i], self._boards[i] = hello, board

    def _commit(self, requests: Requests) -> dict[int, RelayMessage]:
        """Ask silent sites once more, because a site that has committed does not begin again."""
        answers = self._asked("commit", requests)
        silent = {i: message for i, message in requests.items() if _is_silent(answers.get(i))}
        if silent:
            answers.update(self._asked("commit", silent))
        return _all_of("commit", requests, answers)

    def _release(self, session: CryptoSession, exchange: int, requests: Requests, locked: Requests) -> RelayOutcome:
        """Unlock all models with the released keys, and open their layers."""
        keys: dict[int, set[bytes]] = {i: set() for i in locked}
        for _ in range(2):
            for answer in self._asked("release", requests).values():
                if isinstance(answer, RelayMessage):
                    for i, key in answer.by_model_index("key").items():
                        keys.get(i, set()).add(key)
            if all(keys.values()):
                break
        result, sealed = self.result, dict[int, list[bytes]]()
        for i, message in locked.items():
            try:
                sealed[i] = self._unlocked(session, exchange, i, message.parts.get("model", b""), keys[i])
            except CryptoRejected as error:
                result.failed[i] = f"rejected: {error}"
        if twice := _twice(sealed):
            return self._give_up(list(locked), f"rejected: {twice}")
        for i, layers in sealed.items():
            try:
                result.models[i] = [self.key.open(layer, session, number) for number, layer in enumerate(layers)]
            except CryptoRejected as error:
                result.failed[i] = f"rejected: {error}"
        return result

    def _unlocked(
        self, session: CryptoSession, exchange: int, model_index: int, model: bytes, keys: Iterable[bytes]
    ) -> list[bytes]:
        """Return the layers of one model, each still sealed."""
        participant = self._hellos[model_index].participant
        error = CryptoRejected("no site released the key to its model.")
        for key in keys:
            try:
                opened = decrypt_model(key, model, session, exchange, participant)
            except CryptoRejected as wrong:
                error = wrong
                continue
            return split_crypto_parts(opened, self.terms.sealed_sizes, f"the model of {participant}")
        raise error

    def _give_up(self, model_indices: Iterable[int], reason: str) -> RelayOutcome:
        self.result.models.clear()
        for i in model_indices:
            self.result.failed.setdefault(i, reason)
        return self.result

    # Requests and replies

    def _asked(self, stage: str, requests: Requests) -> dict[int, Reply]:
        answers = {i: answer for i, answer in self._ask_sites(stage, requests).items() if i in requests}
        for i in requests:
            answers.setdefault(i, MissingRelayMessage("did not answer"))
        self._count(requests, answers)
        return answers

    def _count(self, requests: Requests, answers: Replies) -> None:
        self.result.bytes_down += sum(message.nbytes for message in requests.values())
        self.result.bytes_up += sum(message.nbytes for message in answers.values() if isinstance(message, RelayMessage))

    def _stage(self, stage: str, requests: Requests) -> dict[int, RelayMessage]:
        return _all_of(stage, requests, self._asked(stage, requests))

    def _passed(self, stage: str, requests: Requests) -> dict[int, dict[str, bytes]]:
        return _delivered(stage, self._stage(stage, requests))


def _is_silent(answer: Reply | None) -> bool:
    return answer is None or (isinstance(answer, MissingRelayMessage) and not answer.refused)


def _all_of(stage: str, requests: Requests, answers: Replies) -> dict[int, RelayMessage]:
    """Return the replies if none is missing. A site that refuses may take part in the next attempt."""
    messages = {i: answer for i, answer in answers.items() if isinstance(answer, RelayMessage)}
    faults = {i: answer for i, answer in answers.items() if isinstance(answer, MissingRelayMessage)}
    if not faults:
        return messages
    silent = {i: answer.reason for i, answer in faults.items() if not answer.refused}
    refusals = [answer.reason for answer in faults.values() if answer.refused]
    raise _Dropped(silent, (refusals or [f"model {i} at {stage}: {reason}" for i, reason in silent.items()])[0])


def _delivered(stage: str, answers: Mapping[int, RelayMessage]) -> dict[int, dict[str, bytes]]:
    """Return the sites' messages to each other, by receiver."""
    letters = {i: message.by_model_index(stage) for i, message in answers.items()}
    for i, written in letters.items():
        if written.keys() != letters.keys() - {i}:
            raise _Dropped({i: f"rejected: it did not write to everybody at {stage}"}, f"model {i} at {stage}")
    return {
        receiver: {f"{stage}/{sender}": written[receiver] for sender, written in letters.items() if sender != receiver}
        for receiver in letters
    }


def _twice(models: Mapping[int, list[bytes]]) -> str:
    """Return what is wrong if a layer is in two models. Sealing a layer twice gives different bytes."""
    seen: dict[bytes, int] = {}
    for i, layers in models.items():
        for number, layer in enumerate(layers):
            if (other := seen.setdefault(layer, i)) != i:
                return f"models {other} and {i} have handed over the same layer {number}."
    return ""
