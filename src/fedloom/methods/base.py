"""The parts a method is made of.

- `Server`: what the server keeps, whom it asks, what it sends to each client, how it takes the answers in, which
  model it would deploy.
- `Local`: how one client turns the model it received into the one it returns.
- `Companion`: what travels beside the models (control variates, a generator), and what the server does with it.
- `Refiner`: what the server does to fresh models before they are used.

A method is a paper, and brings the parts that are new in it (see catalogue.py); parts that nobody brings are
FedAvg's. What a part must remember between rounds it names in `kept`: that is saved and restored without knowing
the method.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.data import InputTransform, Samples
from fedloom.training.batches import Batch
from fedloom.training.context import Criterion
from fedloom.training.trainer import LocalSteps, LocalTrainer
from fedloom.utils.partial_results import PartialResults
from fedloom.utils.settings import Settings


class Options(Settings):
    """The options of a method, each with a docstring below it and the paper's value as default."""


O = TypeVar("O", bound=Options)  # noqa: E741 - the usual name for it

Progress = Callable[[str, int, int], None]
"""Called with (what, steps so far, steps in all) by work on the server that takes long."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Progress that nobody follows."""


@dataclass(frozen=True)
class MethodContext:
    """What the parts of a method may know about the run."""

    layout: Layout
    initial: Tensor
    """The model all start from. Copy it."""
    clients: int
    per_round: int
    rounds: int
    streams: RngStreams
    training: TrainingConfig
    samples: Callable[[int], int]
    """How many samples a client has."""
    criterion: Criterion
    make_module: Callable[[], nn.Module]
    """A new copy of the network, for parts that compute with models on the server."""
    classes: int
    shape: tuple[int, ...]
    """Of one input of the network."""
    cache_dir: Path | None
    """Where a server may keep more rows than memory holds; None: in memory."""
    keep_checkpoints: int
    """How many checkpoints may be gone back to."""
    device: torch.device
    make_bank: Callable[[int, int], Bank]
    """(count, width) -> rows where the engine can read them without copying."""
    server_data: Samples | None = None
    """What the server holds for methods that declare that they need it, as it is stored, on `device`; else None."""
    server_labels: bool = False
    """Whether its labels are those of the run: as many classes, or targets of the same kind."""
    prepare: Callable[[Tensor], Tensor] = field(default_factory=InputTransform.identity)
    """Makes network input of stored samples, such as `server_data.x`."""
    progress: Progress = ignore_progress
    """For work of a part that takes much longer than a round usually does; costs nothing to call often."""
    drafts: PartialResults = field(default_factory=PartialResults)
    """Where such work keeps how far it has come."""

    def bank(self, count: int) -> Bank:
        """A bank of `count` models."""
        return self.make_bank(count, self.layout.size)

    def takes_tokens(self) -> bool:
        """Whether the inputs of the network are numbers of tokens, and no quantities: it has an embedding."""
        return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in self.make_module().modules())


class MethodPart(Generic[O]):
    """A part of a method: made from the run's context and the method's options."""

    kept: ClassVar[tuple[str, ...]] = ()
    """The attributes that make up its state: tensors, banks, numbers, strings, and lists and dicts of them."""

    def __init__(self, context: MethodContext, options: O) -> None:
        self.context = context
        self.options = options

    def state(self) -> dict[str, Any]:
        """What must be saved to go on later as if nothing had happened."""
        return {name: _stored(getattr(self, name)) for name in self.kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state. Tensors are filled in place: others may hold them."""
        for name in self.kept:
            now, saved = getattr(self, name), state[name]
            if isinstance(now, Bank):
                now = now.rows
            if isinstance(now, Tensor) and isinstance(saved, Tensor) and now.shape == saved.shape:
                now.copy_(saved)
            else:
                setattr(self, name, saved)

    def notes(self) -> list[str]:
        """What a person should be told before the run: sentences about settings that work and may not be meant."""
        return []

    def diagnostics(self) -> dict[str, float]:
        """Numbers of the last round worth recording, by name."""
        return {}

    def exhibits(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What it has made and a person may want to look at, as named tensors by the name of a file.

        Each is written into the run's folder when it first appears, and is not to change after that.
        """
        return {}


def _stored(value: Any) -> Any:
    return value.rows if isinstance(value, Bank) else value


class Server(MethodPart[O], ABC):
    """The server's side of the rounds. Rounds count from 0."""

    def select(self, round: int) -> list[int]:
        """Whom to ask: `per_round` different clients, uniformly, in random order."""
        context = self.context
        draw = context.streams.numpy("select", round)
        return [int(c) for c in draw.choice(context.clients, context.per_round, replace=False)]

    @abstractmethod
    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        """A model for each of these clients. Rows of the server's own bank are not copied on the way."""

    @abstractmethod
    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        """Take in the answers, which come in the order of the jobs, fewer than were asked for or none at all.

        With no answer the models stay as they are. A server that keeps several models keeps that of a lost client.
        """

    @abstractmethod
    def deploy(self) -> Tensor:
        """The model the server would hand out now, as a row. It never feeds back into training."""

    def own_model(self, client: int) -> Tensor | None:
        """The model that a personalised method keeps for this client alone; None where it has the deployed one."""
        return None

    @abstractmethod
    def models(self) -> Tensor:
        """The models the next round starts from, as a matrix of rows; a refiner may change them in place."""


class Client(MethodPart[O]):
    """A client's side of the rounds: here ordinary training; methods replace what is new in them.

    One object serves one client after the other, and where clients train at once there are several of it. So it keeps
    nothing itself: what belongs to a client lies on the bench.
    """

    def home(self, layout: Layout) -> Shapes:
        """Tensors that each client keeps between rounds, zeros at first."""
        return {}

    def uploads(self, layout: Layout) -> Shapes:
        """Tensors that a client sends back beside its model."""
        return {}

    def fewest_samples(self) -> int:
        """How many samples a client must have so that what it uploads shows none of them.

        Sites whose samples nobody is to see do not train with fewer; in a simulation nobody minds.
        """
        return 1

    def stays_home(self, layout: Layout) -> list[slice]:
        """Columns of the model that never travel: each client trains its own, starting from the initial model's."""
        return []

    def holds_out(self) -> float:
        """The share of each client's samples that it needs for validation, where the run's `validation` is 0."""
        return 0.0

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        """Train the model on the bench: yield passes, and do what is to be done before, between and after them."""
        yield LocalSteps(self.step)

    def personal(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        """Turn the deployed model on the bench into the one this client would use, as `train` does; it is then scored.

        What stays home is the client's own already. Nothing came beside the model, and what is done here is forgotten.
        """
        yield from ()

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        """One step on one batch; returns the loss."""
        loss = bench.loss(batch)
        bench.backward(loss)
        self.correct(bench)
        bench.descend()
        return loss

    def correct(self, bench: LocalTrainer) -> None:
        """Change `bench.gradient` before it is used: where many methods differ from FedAvg by one line."""


class Extras(MethodPart[O], ABC):
    """What travels beside the models, on the server's side."""

    @abstractmethod
    def send(self, round: int, client: int) -> Mapping[str, Tensor]:
        """What this client receives beside its model."""

    @abstractmethod
    def take(self, round: int, update: ClientUpdate) -> None:
        """Take in what came with one accepted update, in the order of the jobs."""

    def finish(self, round: int) -> None:
        """The round is over: change what will be sent next."""


class Refiner(MethodPart[O], ABC):
    """What the server does to fresh models before they are used."""

    def take(self, round: int, update: ClientUpdate) -> None:
        """See one accepted update, in the order of the jobs: the clients' models are gone by the time of `refine`."""

    @abstractmethod
    def refine(self, round: int, server: Server[Any]) -> None:
        """Improve each row of `server.models()` in place."""
