"""The Flower engine: each task is one message to a remote site.

Client states stay at the sites. A site stages the new state under the nonce of the task, and the next request to that
client names the nonce of the update that the server accepted. So a client's work counts only after its update was
accepted, as in every other engine, and the result has the same bits.

A round goes on without the clients that do not reply within the deadline. Later replies are counted and dropped. Every
reply must repeat the run, the round, the client and the nonce of its request, and come from the node that was asked.
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

from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate, Shapes
from fedloom.data import FederatedDataset
from fedloom.devices.threads import SingleThread
from fedloom.engines.base import Engine
from fedloom.errors import InputError
from fedloom.flower.message import ADDRESS, MessageArray, MessageRejected, SiteMessage
from fedloom.flower.server.client_registry import LOG, ClientRegistry
from fedloom.flower.server.transport import GridTransport, Transport
from fedloom.flower.site_data import SiteDataServerView
from fedloom.flower.tensors import ModelTensorCodec, decode_tensor_into, encode_tensor
from fedloom.runs.resolve import RunRequest
from fedloom.training.context import TrainingContext
from fedloom.training.trainer import LocalTrainer

SHORTEST_POLL, LONGEST_POLL, POLL_SHARE = 0.05, 1.0, 0.05
"""Polling interval for replies: shortest and longest in seconds, and as a share of the time that the round has waited.
Each poll costs the SuperLink a few milliseconds, and it has many nodes to serve."""
LATE_SECONDS = 60.0
"""Seconds after the deadline in which late replies are still counted."""
ARRIVAL_SECONDS = 10.0
"""Seconds that a round waits for a newly connected site to register."""


@dataclass(frozen=True)
class EngineSiteRequest:
    """A request to one client."""

    client_id: int
    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, MessageArray] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineNoReply:
    """The reason why a request has no reply."""

    reason: str
    state_lost: bool = False
    permanent: bool = False
    """Whether the request will fail every time."""
    was_sent: bool = True
    """Whether the request was sent."""


class EngineUpdateExchange(Protocol):
    """Exchange of updates between sites, before the server gets any of them."""

    def check(self, uploads: Shapes) -> None:
        """Raise an error if clients with these uploads cannot take part."""

    def plan(self, engine: "FlowerEngine", round: int) -> bool:
        """Return whether the sites exchange updates in this round."""

    def run(
        self, engine: "FlowerEngine", round: int, tasks: Sequence[ClientTask], requests: Sequence[EngineSiteRequest]
    ) -> Iterator[SiteMessage | EngineNoReply]:
        """Yield the replies to these `train` requests after the exchange, in their order."""

    def diagnostics(self) -> Mapping[str, float]:
        """Return the diagnostics of this round's exchange."""


class FlowerEngine(Engine):
    """Engine that sends tasks to sites, which exchange updates before they reply if there is an `exchange`."""

    name = "flower"
    checkpoint_every_round = True

    def __init__(
        self,
        context: TrainingContext,
        transport: Transport,
        registry: ClientRegistry,
        deadline: float,
        sites_file: Path | None = None,
        exchange: EngineUpdateExchange | None = None,
    ) -> None:
        super().__init__(context)
        self.transport, self.registry, self.deadline, self._exchange = transport, registry, deadline, exchange
        self._sites_file = sites_file
        self._threads = SingleThread()  # as in the multiprocess engine's workers
        layout = context.layout
        self._fingerprint = layout.fingerprint()
        self.codec = ModelTensorCodec(layout, context.client.personal_columns)
        self._row = layout.empty()
        self._trainer: LocalTrainer | None = None
        self.accepted: dict[int, str] = {}
        """Nonce of the last accepted update of each client with a state."""
        self._nonce = ""
        self._late: dict[str, tuple[int, int, float]] = {}
        self.late = 0
        """Replies in the whole run that came after their deadline."""

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        round = tasks[0].round if tasks else 0
        arrays: dict[object, MessageArray] = {}

        def once(tensor: Tensor, row: bool = False) -> MessageArray:
            """Encode a tensor that several clients get only once."""
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, row
            if key not in arrays:
                arrays[key] = self.codec.encode(tensor) if row else encode_tensor(tensor)
            return arrays[key]

        requests = []
        for task in tasks:
            extras = {f"extra/{name}": once(tensor) for name, tensor in task.extras.items()}
            header = {"accepted": self.accepted.get(task.client_id)}
            requests.append(
                EngineSiteRequest(task.client_id, "train", header, {"model": once(task.row, row=True), **extras})
            )
        exchange = self._exchange
        exchanged = exchange is not None and exchange.plan(self, round)
        answers = exchange.run(self, round, tasks, requests) if exchange and exchanged else self.ask(round, requests)
        for task, answer in zip(tasks, answers, strict=True):
            if isinstance(answer, EngineNoReply):
                if answer.state_lost:
                    self.accepted.pop(task.client_id, None)
                # Outside the exchange a site's word alone does not lift the minimum of updates.
                yield ClientFailure(task, answer.reason, answer.permanent and exchanged, answer.was_sent)
                continue
            try:
                update = self._update(task, answer)
            except MessageRejected as refused:
                LOG.warning("round %d: the update of client %d is rejected: %s", round + 1, task.client_id, refused)
                yield ClientFailure(task, f"rejected: {refused}")
                continue
            self._nonce = answer.header["nonce"]
            yield replace(update, exchanged=exchanged)

    def default_min_clients(self, num_clients: int) -> int:
        return num_clients // 2 + 1 if num_clients else 0

    def _update(self, task: ClientTask, answer: SiteMessage) -> ClientUpdate:
        """Return the update in a reply, checked."""
        header, upload_shapes = answer.header, self.context.client.upload_shapes
        if answer.kind != "trained":
            raise MessageRejected(f"it sent {answer.kind[:40]!r}, not a trained model")
        expected = {"model", *(f"upload/{name}" for name in upload_shapes)}
        if answer.arrays.keys() != expected:
            raise MessageRejected(f"it sent {_names(answer.arrays)}, not {_names(expected)}")
        self.check_training_header(task.client_id, answer)
        num_examples, steps, loss = header["num_examples"], header["steps"], header["loss"]
        row = self.codec.decode(answer.arrays["model"], self._row.copy_(task.row))
        uploads = {
            name: decode_tensor_into(
                torch.empty(shape, dtype=self.context.layout.dtype), answer.arrays[f"upload/{name}"], f"its {name}"
            )
            for name, shape in upload_shapes.items()
        }
        return ClientUpdate(task, row, num_examples, loss, steps, uploads)

    def check_training_header(self, client_id: int, answer: SiteMessage) -> None:
        """Reject a reply whose number of samples, steps or loss is invalid."""
        num_examples, steps, loss = (answer.header.get(name) for name in ("num_examples", "steps", "loss"))
        if type(num_examples) is not int or type(steps) is not int or type(loss) is not float or steps < 0:
            raise MessageRejected("it sent no valid num_examples, steps and loss")
        declared = self.registry.registered[client_id].num_train_examples
        if num_examples != declared:
            raise MessageRejected(f"it says that it trained on {num_examples} samples, but it registered {declared}")

    def commit_update(self, update: ClientUpdate) -> None:
        if self.context.client.state_shapes:
            self.accepted[update.client_id] = self._nonce

    def evaluate(self, row: Tensor) -> EvaluationResult | None:
        test = self.context.data.test
        if test is None or not len(test):
            return None
        if self._trainer is None:
            self._trainer = LocalTrainer(self.context)
        results = [self._trainer.evaluate(row, test[chunk]) for chunk in evaluation_slices(test)]
        return sum(results[1:], start=results[0])

    def evaluate_clients(self, tasks: Sequence[ClientTask]) -> list[float | None]:
        round = tasks[0].round if tasks else 0
        requests = [
            EngineSiteRequest(
                task.client_id,
                "evaluate",
                {"accepted": self.accepted.get(task.client_id)},
                {"model": self.codec.encode(task.row)},
            )
            for task in tasks
        ]
        found: list[float | None] = []
        for answer in self.ask(round, requests):
            accuracy = answer.header.get("accuracy") if isinstance(answer, SiteMessage) else None
            fits = isinstance(accuracy, float) and math.isfinite(accuracy) and 0 <= accuracy <= 1
            found.append(accuracy if fits else None)
        return found

    def ask(
        self, round: int, requests: Sequence[EngineSiteRequest], deadline: float | None = None
    ) -> Iterator[SiteMessage | EngineNoReply]:
        """Send requests to clients, all at once, and yield the replies in the order of the requests.

        The engine checks that each reply belongs to its request, but not what it contains.
        """
        limit = self.deadline if deadline is None else deadline
        end = time.monotonic() + limit
        self.registry.wait_for(self.transport, {q.client_id for q in requests}, min(ARRIVAL_SECONDS, limit / 2))
        if self._sites_file is not None and self._sites_file.parent.is_dir():
            self.registry.save(self._sites_file)
        found: dict[int, SiteMessage | EngineNoReply] = {}
        asked: dict[str, tuple[int, int, SiteMessage]] = {}
        try:
            for index, request in enumerate(requests):
                node = self.registry.node_of(request.client_id)
                if node is None:
                    found[index] = EngineNoReply(self.registry.absence_reason(), was_sent=False)
                    continue
                registration = self.registry.registrations[request.client_id]
                if registration.get("layout") != self._fingerprint:
                    versions = registration.get("versions")
                    found[index] = EngineNoReply(f"its network differs from the server's ({versions})", was_sent=False)
                    continue
                address = {
                    "run": self.registry.run,
                    "round": round,
                    "client_id": request.client_id,
                    "nonce": token_hex(16),
                }
                message = SiteMessage(request.kind, {**request.header, **address}, request.arrays)
                ticket = self.transport.send(node, message, limit + LATE_SECONDS)
                if ticket is None:
                    found[index] = EngineNoReply("its request could not be sent", was_sent=False)
                else:
                    asked[ticket] = index, node, SiteMessage(request.kind, message.header)
            for index in range(len(requests)):
                while index not in found:
                    heard = self._listen(asked, found)
                    if index not in found and time.monotonic() > end:
                        found[index] = EngineNoReply(f"no answer within {limit:g} s")
                    elif not heard:
                        waited = time.monotonic() - (end - limit)
                        time.sleep(min(LONGEST_POLL, max(SHORTEST_POLL, POLL_SHARE * waited)))
                yield found.pop(index)
        finally:
            now = time.monotonic()
            for ticket, (_, _, message) in asked.items():
                self._late[ticket] = message.header["client_id"], round, now + LATE_SECONDS

    def _listen(
        self, asked: dict[str, tuple[int, int, SiteMessage]], found: dict[int, SiteMessage | EngineNoReply]
    ) -> bool:
        """Handle the replies that have arrived; return whether there were any."""
        for ticket in [ticket for ticket, (_, _, until) in self._late.items() if time.monotonic() > until]:
            del self._late[ticket]
        answers = self.transport.receive([*asked, *self._late]) if asked or self._late else []
        for answer in answers:
            if answer.ticket in self._late:
                client_id, round, _ = self._late.pop(answer.ticket)
                if answer.message is not None:
                    self.late += 1
                    LOG.warning("an answer of client %d to round %d came too late and is dropped", client_id, round + 1)
            elif answer.ticket in asked:
                index, node, request = asked.pop(answer.ticket)
                if index not in found:
                    found[index] = _judged(answer.message, answer.error, answer.node, node, request)
        return bool(answers)

    def diagnostics(self) -> dict[str, float]:
        late = {"late": float(self.late)} if self.late else {}
        return {**self._exchange.diagnostics(), **late} if self._exchange is not None else late

    def state_dict(self) -> dict[str, Any]:
        accepted = {str(client_id): nonce for client_id, nonce in sorted(self.accepted.items())}
        return {"accepted": accepted, "late": self.late}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.accepted = {int(client_id): str(nonce) for client_id, nonce in state.get("accepted", {}).items()}
        self.late = int(state.get("late", 0))

    def close(self) -> None:
        self._threads.release()


def _judged(
    message: SiteMessage | None, error: str, came_from: int, asked: int, request: SiteMessage
) -> SiteMessage | EngineNoReply:
    """Return a reply if it belongs to this request, else the reason why not."""
    if message is None:
        return EngineNoReply(error)
    if came_from != asked:
        return EngineNoReply(f"rejected: its answer came from node {came_from}, and node {asked} was asked")
    for name in ADDRESS:
        there = message.header.get(name)
        if there != request.header[name] or type(there) is not type(request.header[name]):
            return EngineNoReply(
                f"rejected: its answer has the {name} {str(there)[:40]!r}, not {request.header[name]!r}"
            )
    if message.kind == "failed":
        reason = " ".join(str(message.header.get("reason", "it gave no reason")).split())[:300]
        state_lost, permanent = (message.header.get(name) is True for name in ("state_lost", "permanent"))
        return EngineNoReply(reason, state_lost, permanent)
    return message


def _names(names: Any) -> str:
    """Return a short list of names, which a site may have chosen."""
    shown = sorted(str(name)[:40] for name in names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


SITES_FILE = "sites.json"
"""File of the client registry in the run directory."""


EXCHANGE = "fedloom.flower.secure_recombination.server"
"""Module of the exchange between sites."""


def make_engine_exchange(request: RunRequest, context: TrainingContext) -> EngineUpdateExchange | None:
    """Return the exchange between the sites of this run, or None."""
    exchange: EngineUpdateExchange | None = importlib.import_module(EXCHANGE).make_server_exchange(
        request, context.layout
    )
    return exchange


class FlowerEngineFactory:
    """A `RemoteEngineFactory` (engines/base.py) for the sites behind a transport."""

    def __init__(self, transport: Transport, request: RunRequest, folder: Path, join_seconds: float) -> None:
        config = request.config
        if config.clients is None:
            raise InputError("a run over sites must say how many clients there are; give --clients.")
        self._transport, self._request = transport, request
        self._file = folder / SITES_FILE
        self.registry = ClientRegistry(config.clients)
        self.registry.load(self._file)
        self.registry.join(transport, join_seconds)

    def server_view(self, federated_data: FederatedDataset) -> FederatedDataset:
        return SiteDataServerView(federated_data, len(federated_data), self.registry.num_examples)

    def create_engine(self, context: TrainingContext) -> Engine:
        if isinstance(self._transport, GridTransport):
            self._transport.max_bytes = _largest_answer(context)
        exchange = make_engine_exchange(self._request, context)
        return FlowerEngine(
            context, self._transport, self.registry, self._request.config.deadline, self._file, exchange
        )


def _largest_answer(context: TrainingContext) -> int:
    """Return more bytes than a valid reply has: twice the model and uploads, because encryption adds a little."""
    numbers = context.layout.size + sum(math.prod(shape) for shape in context.client.upload_shapes.values())
    return (1 << 20) + 2 * numbers * context.layout.dtype.itemsize
