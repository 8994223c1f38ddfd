"""The Flower engine: clients are sites elsewhere, and each job is one message to one of them.

What a client keeps stays at its site. The site has it ready under the nonce of the job, and the next question to that
client says which nonce the server took; so nothing a client did counts before its update was accepted, as in every
other engine, and the result has the same bits.

A round goes on without those who do not answer within the deadline. What comes later is counted and dropped. Every
answer must repeat the run, the round, the client and the nonce of its question, and come from the node that was asked.
"""

import importlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate, Shapes
from fedloom.data import FederatedDataset
from fedloom.engines.base import Engine
from fedloom.errors import InputError
from fedloom.flower.message import ADDRESS, MessageArray, MessageRejected, SiteMessage
from fedloom.flower.server.client_registry import LOG, ClientRegistry
from fedloom.flower.server.transport import GridTransport, Transport
from fedloom.flower.site_data import SiteDataServerView
from fedloom.flower.tensors import ModelTensorCodec, decode_tensor_into, encode_tensor
from fedloom.training.local_training import EngineContext
from fedloom.training.trainer import LocalTrainer

SHORTEST_POLL, LONGEST_POLL, POLL_SHARE = 0.05, 1.0, 0.05
"""Seconds between two looks for answers: at least, at most, and as a share of the time that the round has waited. Each
look costs the SuperLink a few milliseconds, which many nodes share."""
LATE_SECONDS = 60.0
"""How long after its deadline an answer may still come, to be counted."""
ARRIVAL_SECONDS = 10.0
"""How long a round waits for a site that has just come, to say who it is."""


@dataclass(frozen=True)
class SiteRequest:
    """What one client is asked."""

    client: int
    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, MessageArray] = field(default_factory=dict)


@dataclass(frozen=True)
class NoSiteReply:
    """Why there is no answer to a question."""

    reason: str
    state_lost: bool = False
    for_good: bool = False
    """Whether there will be none however often it is asked."""
    asked: bool = True
    """Whether the question was sent."""


class UpdateExchange(Protocol):
    """What sites do with their updates among themselves before the server gets any."""

    def check(self, uploads: Shapes) -> None:
        """Refuse clients that send this beside their models."""

    def plan(self, engine: "FlowerEngine", round: int) -> bool:
        """Whether they do so in this round."""

    def run(
        self, engine: "FlowerEngine", round: int, jobs: Sequence[ClientTask], questions: Sequence[SiteRequest]
    ) -> Iterator[SiteMessage | NoSiteReply]:
        """The answers to these questions, of the kind `train`, after the exchange; in their order."""

    def diagnostics(self) -> Mapping[str, float]:
        """What the exchange of this round took."""


class FlowerEngine(Engine):
    """Asks sites over a link, and lets them exchange updates before they answer, where there is an `exchange`."""

    name = "flower"
    saves_every_round = True

    def __init__(
        self,
        shop: EngineContext,
        link: Transport,
        roster: ClientRegistry,
        deadline: float,
        sites_file: Path | None = None,
        exchange: UpdateExchange | None = None,
    ) -> None:
        super().__init__(shop)
        self.link, self.roster, self.deadline, self._exchange = link, roster, deadline, exchange
        self._sites_file = sites_file
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the host engine's workers: with more threads sums round differently
        layout = shop.workshop.layout
        self._fingerprint = layout.fingerprint()
        self.travel = ModelTensorCodec(layout, shop.workshop.stays_home)
        self._row = layout.empty()
        self._bench: LocalTrainer | None = None
        self.accepted: dict[int, str] = {}
        """The nonce of the last update that was taken from each client that keeps something."""
        self._nonce = ""
        self._late: dict[str, tuple[int, int, float]] = {}
        self.late = 0
        """Answers that came after their deadline, in the whole run."""

    def train(self, round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        blocks: dict[object, MessageArray] = {}

        def once(tensor: Tensor, row: bool = False) -> MessageArray:
            """One copy of what several clients get."""
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, row
            if key not in blocks:
                blocks[key] = self.travel.pack(tensor) if row else encode_tensor(tensor)
            return blocks[key]

        questions = []
        for job in jobs:
            extras = {f"extra/{name}": once(tensor) for name, tensor in job.extras.items()}
            header = {"accepted": self.accepted.get(job.client)}
            questions.append(SiteRequest(job.client, "train", header, {"row": once(job.row, row=True), **extras}))
        exchange = self._exchange
        exchanged = exchange is not None and exchange.plan(self, round)
        answers = exchange.run(self, round, jobs, questions) if exchange and exchanged else self.ask(round, questions)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, NoSiteReply):
                if answer.state_lost:
                    self.accepted.pop(job.client, None)
                yield ClientFailure(job, answer.reason, answer.for_good, answer.asked)
                continue
            try:
                update = self._update(job, answer)
            except MessageRejected as refused:
                LOG.warning("round %d: the answer of client %d is refused: %s", round + 1, job.client, refused)
                yield ClientFailure(job, f"refused: {refused}")
                continue
            self._nonce = answer.header["nonce"]
            yield replace(update, exchanged=exchanged)

    def fewest_answers(self, asked: int) -> int:
        return asked // 2 + 1 if asked else 0

    def _update(self, job: ClientTask, answer: SiteMessage) -> ClientUpdate:
        """The update that an answer holds, measured before it is used."""
        header, shop = answer.header, self.shop.workshop
        if answer.kind != "trained":
            raise MessageRejected(f"it sent {answer.kind[:40]!r}, not a trained model")
        expected = {"row", *(f"upload/{name}" for name in shop.uploads)}
        if answer.blocks.keys() != expected:
            raise MessageRejected(f"it sent {_names(answer.blocks)}, not {_names(expected)}")
        self.check_words(job.client, answer)
        samples, steps, loss = header["samples"], header["steps"], header["loss"]
        row = self.travel.unpack(answer.blocks["row"], self._row.copy_(job.row))
        uploads = {
            name: decode_tensor_into(
                torch.empty(shape, dtype=shop.layout.dtype), answer.blocks[f"upload/{name}"], f"its {name}"
            )
            for name, shape in shop.uploads.items()
        }
        return ClientUpdate(job, row, samples, loss, steps, uploads)

    def check_words(self, client: int, answer: SiteMessage) -> None:
        """Refuse an answer that does not say rightly how its client trained."""
        samples, steps, loss = (answer.header.get(name) for name in ("samples", "steps", "loss"))
        if type(samples) is not int or type(steps) is not int or type(loss) is not float or steps < 0:
            raise MessageRejected("it does not say how it trained")
        declared = self.roster.registered[client].trains
        if samples != declared:
            raise MessageRejected(f"it says that it trained on {samples} samples, but it registered {declared}")

    def accept(self, update: ClientUpdate) -> None:
        if self.shop.workshop.home:
            self.accepted[update.client] = self._nonce

    def score(self, row: Tensor) -> EvaluationResult | None:
        test = self.shop.federation.test
        if test is None or not len(test):
            return None
        if self._bench is None:
            self._bench = LocalTrainer(self.shop.workshop)
        pieces = [self._bench.score(row, test[chunk]) for chunk in evaluation_slices(test)]
        return sum(pieces[1:], start=pieces[0])

    def score_clients(self, round: int, jobs: Sequence[ClientTask]) -> list[float | None]:
        questions = [
            SiteRequest(
                job.client, "score", {"accepted": self.accepted.get(job.client)}, {"row": self.travel.pack(job.row)}
            )
            for job in jobs
        ]
        found: list[float | None] = []
        for answer in self.ask(round, questions):
            accuracy = answer.header.get("accuracy") if isinstance(answer, SiteMessage) else None
            fits = isinstance(accuracy, float) and math.isfinite(accuracy) and 0 <= accuracy <= 1
            found.append(accuracy if fits else None)
        return found

    def ask(
        self, round: int, questions: Sequence[SiteRequest], deadline: float | None = None
    ) -> Iterator[SiteMessage | NoSiteReply]:
        """Ask clients, all at once; answers come in the order of the questions.

        Each is checked to be the answer to its question, and not to hold anything else.
        """
        limit = self.deadline if deadline is None else deadline
        end = time.monotonic() + limit
        self.roster.wait_for(self.link, {q.client for q in questions}, min(ARRIVAL_SECONDS, limit / 2))
        if self._sites_file is not None and self._sites_file.parent.is_dir():
            self.roster.save(self._sites_file)
        found: dict[int, SiteMessage | NoSiteReply] = {}
        asked: dict[str, tuple[int, int, SiteMessage]] = {}
        try:
            for index, question in enumerate(questions):
                node = self.roster.node_of(question.client)
                if node is None:
                    found[index] = NoSiteReply(self.roster.absence(), asked=False)
                    continue
                greeting = self.roster.greetings[question.client]
                if greeting.get("layout") != self._fingerprint:
                    versions = greeting.get("versions")
                    found[index] = NoSiteReply(
                        f"its network is another one than the server's ({versions})", asked=False
                    )
                    continue
                address = {"run": self.roster.run, "round": round, "client": question.client, "nonce": token_hex(16)}
                parcel = SiteMessage(question.kind, {**question.header, **address}, question.blocks)
                ticket = self.link.send(node, parcel, limit + LATE_SECONDS)
                if ticket is None:
                    found[index] = NoSiteReply("its question could not be sent", asked=False)
                else:
                    asked[ticket] = index, node, SiteMessage(question.kind, parcel.header)
            for index in range(len(questions)):
                while index not in found:
                    heard = self._listen(asked, found)
                    if index not in found and time.monotonic() > end:
                        found[index] = NoSiteReply(f"no answer within {limit:g} s")
                    elif not heard:
                        waited = time.monotonic() - (end - limit)
                        time.sleep(min(LONGEST_POLL, max(SHORTEST_POLL, POLL_SHARE * waited)))
                yield found.pop(index)
        finally:
            now = time.monotonic()
            for ticket, (_, _, parcel) in asked.items():
                self._late[ticket] = parcel.header["client"], round, now + LATE_SECONDS

    def _listen(
        self, asked: dict[str, tuple[int, int, SiteMessage]], found: dict[int, SiteMessage | NoSiteReply]
    ) -> bool:
        """Take in what has come; whether that was anything."""
        for ticket in [ticket for ticket, (_, _, until) in self._late.items() if time.monotonic() > until]:
            del self._late[ticket]
        answers = self.link.receive([*asked, *self._late]) if asked or self._late else []
        for answer in answers:
            if answer.ticket in self._late:
                client, round, _ = self._late.pop(answer.ticket)
                if answer.parcel is not None:
                    self.late += 1
                    LOG.warning("an answer of client %d to round %d came too late and is dropped", client, round + 1)
            elif answer.ticket in asked:
                index, node, question = asked.pop(answer.ticket)
                if index not in found:
                    found[index] = _judged(answer.parcel, answer.error, answer.node, node, question)
        return bool(answers)

    def diagnostics(self) -> dict[str, float]:
        late = {"late": float(self.late)} if self.late else {}
        return {**self._exchange.diagnostics(), **late} if self._exchange is not None else late

    def state(self) -> dict[str, Any]:
        accepted = {str(client): nonce for client, nonce in sorted(self.accepted.items())}
        return {"accepted": accepted, "late": self.late}

    def load(self, state: Mapping[str, Any]) -> None:
        self.accepted = {int(client): str(nonce) for client, nonce in state.get("accepted", {}).items()}
        self.late = int(state.get("late", 0))

    def close(self) -> None:
        torch.set_num_threads(self._threads)


def _judged(
    parcel: SiteMessage | None, error: str, came_from: int, asked: int, question: SiteMessage
) -> SiteMessage | NoSiteReply:
    """An answer, if it is one to this question."""
    if parcel is None:
        return NoSiteReply(error)
    if came_from != asked:
        return NoSiteReply(f"refused: its answer came from node {came_from}, and node {asked} was asked")
    for name in ADDRESS:
        there = parcel.header.get(name)
        if there != question.header[name] or type(there) is not type(question.header[name]):
            return NoSiteReply(f"refused: its answer has the {name} {str(there)[:40]!r}, not {question.header[name]!r}")
    if parcel.kind == "failed":
        reason = " ".join(str(parcel.header.get("reason", "it gave no reason")).split())[:300]
        state_lost, for_good = (parcel.header.get(name) is True for name in ("state_lost", "for_good"))
        return NoSiteReply(reason, state_lost, for_good)
    return parcel


def _names(names: Any) -> str:
    """What was sent, in few words, whoever named it."""
    shown = sorted(str(name)[:40] for name in names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


SITES_FILE = "sites.json"
"""Where the run's folder says which site has which client."""


EXCHANGE = "fedloom.flower.secure_recombination.server"
"""The module that knows what sites exchange before the server gets their updates."""


def update_exchange(config: Config, shop: EngineContext) -> UpdateExchange | None:
    """What the sites of this run exchange; None: nothing."""
    exchange: UpdateExchange | None = importlib.import_module(EXCHANGE).exchange_for(config, shop.workshop.layout)
    return exchange


class FlowerEngineFactory:
    """The sites behind a link, as a run wants them (`experiment.Sites`)."""

    def __init__(self, link: Transport, config: Config, folder: Path, join: float) -> None:
        if config.clients is None:
            raise InputError("a run over sites must say how many clients there are; give --clients.")
        self._link, self._config = link, config
        self._file = folder / SITES_FILE
        self.roster = ClientRegistry(config.clients)
        self.roster.load(self._file)
        self.roster.join(link, join)

    def seen(self, federation: FederatedDataset) -> FederatedDataset:
        return SiteDataServerView(federation, len(federation), self.roster.samples)

    def engine(self, shop: EngineContext) -> Engine:
        if isinstance(self._link, GridTransport):
            self._link.most = _largest_answer(shop)
        exchange = update_exchange(self._config, shop)
        return FlowerEngine(shop, self._link, self.roster, self._config.deadline, self._file, exchange)


def _largest_answer(shop: EngineContext) -> int:
    """Bytes that no honest answer has: a model and what goes with it, twice, for what is sealed is a little larger."""
    workshop = shop.workshop
    numbers = workshop.layout.size + sum(math.prod(shape) for shape in workshop.uploads.values())
    return (1 << 20) + 2 * numbers * workshop.layout.dtype.itemsize
