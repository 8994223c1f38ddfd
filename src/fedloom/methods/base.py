"""Base classes of a method's parts: Server, Client, Extras and Refiner.

- `Server`: which clients train, which model each one gets, how updates are aggregated, which model is the global one.
- `Client`: how a client trains the model that it received.
- `Extras`: which tensors travel beside the models (control variates, a generator), and how the server updates them.
- `Refiner`: how the server improves the new models before the next round.

A method provides the parts that are new in its paper (see registry.py); FedAvg provides the others. A part creates its
state in `start`. Checkpoints save every attribute of a part, except those whose names begin with an underscore.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank, RowStore
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.data import InputTransform, Samples
from fedloom.errors import InputError
from fedloom.training.batches import Batch
from fedloom.training.context import Criterion
from fedloom.training.trainer import LocalSteps, LocalTrainer
from fedloom.utils.partial_results import PartialResults
from fedloom.utils.settings import Settings


class Options(Settings):
    """Base class of a method's options, a pydantic model.

    Each option has a type, the paper's value as default, and a docstring below it, which is its help text.

    Example:
        class FedProxOptions(Options):
            mu: float = Field(0.01, ge=0, description="strength of the proximal term; 0 is FedAvg")
    """


O = TypeVar("O", bound=Options)  # noqa: E741 - the usual name for it

Progress = Callable[[str, int, int], None]
"""Called with (what, steps done, steps in total) by server work that takes long."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignore progress reports."""


class _RoundsRead:
    """Notes that a part of the method has read the number of rounds. Worker processes share the note."""

    def __init__(self) -> None:
        self._flag = mmap.mmap(-1, 1)  # forked processes write to the same memory

    @property
    def noted(self) -> bool:
        return self._flag[0] == 1

    def note(self) -> None:
        """Note it, for good."""
        self._flag[0] = 1


@dataclass(frozen=True)
class ServerResources:
    """What a method's parts may use on the server: its device, memory, files and data."""

    device: torch.device
    make_bank: Callable[[int, int], Bank]
    """(count, width) -> rows that the engine reads without a copy."""
    cache_dir: Path | None = None
    """Folder for rows that do not fit in memory; None: keep all rows in memory."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept."""
    data: Samples | None = None
    """The server's samples, as stored, on `device`; None unless the method declares `server_data`."""
    labels_fit: bool = False
    """Whether the labels of `data` fit the run: as many classes, or targets of the same kind."""
    progress: Progress = ignore_progress
    """Reports progress of work that takes much longer than a round. Cheap to call often."""
    partial_results: PartialResults = field(default_factory=PartialResults)
    """Stores partial results of such work, so that a stopped run can continue it."""


@dataclass(frozen=True)
class MethodContext:
    """What a method's parts may know about the run."""

    layout: Layout
    """Where each tensor of the network lies in a row."""
    initial: Tensor
    """The row of the initial model. Copy it, do not change it."""
    num_clients: int
    clients_per_round: int
    planned_rounds: int
    """The number of rounds for those that run them, whose result does not depend on it. Parts read `rounds`."""
    rng_streams: RngStreams
    """Random generators, each derived from (seed, purpose, round, client)."""
    config: TrainingConfig
    """The settings of local training."""
    num_examples: Callable[[int], int]
    """Returns the number of training samples of a client."""
    criterion: Criterion
    make_model: Callable[[], nn.Module]
    """Returns a new copy of the network, for parts that compute with models of their own."""
    classes: int
    """Number of classes; 0 if the data has none."""
    shape: tuple[int, ...]
    """Shape of one network input."""
    server: ServerResources
    transform: Callable[[Tensor], Tensor] = field(default_factory=InputTransform.identity)
    """Turns stored samples, such as `server.data.x`, into network inputs."""
    rounds_read: _RoundsRead = field(default_factory=_RoundsRead)

    @property
    def rounds(self) -> int:
        """The number of rounds. A run whose method has read it cannot be extended."""
        self.rounds_read.note()
        return self.planned_rounds

    def bank(self, count: int) -> Bank:
        """Allocate rows that the engine reads without a copy.

        Args:
            count: How many rows, each for one model.

        Returns:
            The rows, all zeros.
        """
        return self.server.make_bank(count, self.layout.size)

    def takes_tokens(self) -> bool:
        """Return whether network inputs are token ids: the network has an embedding."""
        return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in self.make_model().modules())


class MethodPart(Generic[O]):
    """Base class of all parts of a method.

    Every attribute of a server, extras or a refiner is state, which checkpoints save and restore, unless its name
    begins with an underscore. State is made of tensors, banks, arrays, numbers, strings, and lists and dicts of them.

    Args:
        context: What the part may know about the run.
        options: The options of its method.
    """

    needs: ClassVar[Literal["mean", "updates"]] = "mean"
    """What the server needs of the clients: only the mean of their updates, or each update.

    It is "updates" for a class with a method that sees single updates, unless the class says `needs = "mean"`."""
    needs_reason: ClassVar[str] = ""
    """What the server does with single updates, such as "crosses the clients' models". Error messages say it."""
    _sees_updates: ClassVar[tuple[str, ...]] = ()
    """Methods that see single updates."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        part = next(base for base in cls.__mro__[1:] if issubclass(base, MethodPart))
        overridden = [getattr(cls, name) is not getattr(part, name, None) for name in cls._sees_updates]
        if "needs" not in vars(cls) and any(overridden):
            cls.needs = "updates"

    def __init__(self, context: MethodContext, options: O) -> None:
        self.context = context
        self.options = options
        self.start()
        self._refuse_unsavable_state()

    def start(self) -> None:
        """Create the state of your own, before the first round. `self.context` and `self.options` are there."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""
        self._refuse_unsavable_state()
        return {name: _stored(value) for name, value in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Tensors are filled in place, because others may refer to them.

        Args:
            state: What `state_dict` returned.
        """
        for name, saved in state.items():
            now = getattr(self, name, None)
            if isinstance(now, Tensor) and now.data_ptr() == self.context.initial.data_ptr():
                now = None  # the initial model must not change
            setattr(self, name, _restored(now, saved, self.context.server.device))

    def _state(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_")
            and name not in ("context", "options")
            and not callable(getattr(type(self), name, None))  # a method, replaced on this object
        }

    def _refuse_unsavable_state(self) -> None:
        for name, value in self._state().items():
            if (wrong := _unsavable(value)) is not None:
                raise InputError(
                    f"{type(self).__name__}.{name} holds a {type(wrong).__name__}, which a checkpoint cannot save. "
                    f"Use tensors, numbers, strings, lists and dicts, or call it _{name} if no later round needs it."
                )

    def notes(self) -> list[str]:
        """Return sentences to show before the run, about settings that are valid but probably a mistake."""
        return []

    def diagnostics(self) -> dict[str, float]:
        """Return numbers of the last round to record, by name."""
        return {}

    def artifacts(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return tensors for users to look at, by file name and tensor name.

        Each file is written to the run directory when it first appears, and must not change after that.
        """
        return {}


_Plain = bool | int | float | str | None


def _unsavable(value: Any) -> Any:
    """Return the first thing in `value` that a checkpoint cannot save, or None."""
    if isinstance(value, Mapping):
        found = [key for key in value if not isinstance(key, _Plain)] + list(map(_unsavable, value.values()))
    elif isinstance(value, list | tuple):
        found = list(map(_unsavable, value))
    else:
        return None if isinstance(value, Tensor | Bank | RowStore | np.ndarray | np.generic | _Plain) else value
    return next((each for each in found if each is not None), None)


def _stored(value: Any) -> Any:
    """Return `value` as a checkpoint saves it."""
    if isinstance(value, Bank):
        return value.rows
    if isinstance(value, RowStore):
        return value.state_dict()
    if isinstance(value, Mapping):
        return {key: _stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _restored(now: Any, saved: Any, device: torch.device) -> Any:
    """Return `saved` as an attribute that is `now`; banks and tensors of the same shape are filled in place."""
    if isinstance(now, RowStore):
        now.load_state_dict(saved)
        return now
    rows = now.rows if isinstance(now, Bank) else now
    if isinstance(saved, Tensor):
        if isinstance(rows, Tensor) and rows.shape == saved.shape:
            rows.copy_(saved)
            return now
        return saved.to(rows.device if isinstance(rows, Tensor) else device)
    if isinstance(saved, Mapping):
        known = now if isinstance(now, Mapping) else {}
        return {key: _restored(known.get(key), item, device) for key, item in saved.items()}
    if isinstance(saved, list):
        before = now if isinstance(now, list | tuple) and len(now) == len(saved) else [None] * len(saved)
        items = [_restored(each, item, device) for each, item in zip(before, saved, strict=True)]
        return tuple(items) if isinstance(now, tuple) else items
    return saved


class Server(MethodPart[O], ABC):
    """The server's side of a method.

    A subclass implements `dispatch`, `aggregate`, `global_model` and `models`. Rounds count from 0.

    Example:
        class MeanServer(Server[Options]):  # a part of FedAvg's server; `bank` holds one model
            def dispatch(self, round: int, client_ids: list[int]) -> list[ClientTask]:
                return [ClientTask(client_id, self.bank.rows[0]) for client_id in client_ids]

            def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
                mean = WeightedMean(self.context.layout)
                for update in updates:
                    mean.add(update.row, update.num_examples)
                mean.write_to(self.bank.rows[0])
    """

    _sees_updates: ClassVar[tuple[str, ...]] = ("aggregate",)

    def sample_clients(self, round: int) -> list[int]:
        """Sample the clients of this round.

        Args:
            round: The round, from 0.

        Returns:
            Client ids: here `clients_per_round` different clients, uniformly, in random order.
        """
        context = self.context
        draw = context.rng_streams.numpy("select", round)
        return [int(c) for c in draw.choice(context.num_clients, context.clients_per_round, replace=False)]

    @abstractmethod
    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        """Choose the model that each client trains.

        Args:
            round: The round, from 0.
            client_ids: The sampled clients.

        Returns:
            One task per client. Rows of `context.bank(n)` are sent without a copy.
        """

    @abstractmethod
    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        """Aggregate the updates into the server's models.

        Without any update the models stay as they are. A server with several models keeps that of a failed client.

        Args:
            round: The round, from 0.
            updates: Updates in the order of the tasks, perhaps fewer or none. Each one is valid until the next one.
        """

    @abstractmethod
    def global_model(self) -> Tensor:
        """Return the row of the global model: the model that is evaluated and saved."""

    def personal_model(self, client_id: int) -> Tensor | None:
        """Return the model that the server keeps for this client alone; None: it uses the global model.

        Args:
            client_id: The client.
        """
        return None

    @abstractmethod
    def models(self) -> Tensor:
        """Return the models that the next round starts from, one per row. A refiner changes them in place."""


class Client(MethodPart[O]):
    """The client's side of a method: here ordinary local training.

    A subclass overrides the smallest of `adjust_gradient`, `training_step` and `train` that is enough. One object
    serves all clients, and several workers have copies of it. So do not store anything on it: the trainer holds all
    that belongs to a client.

    Example:
        class FedProxClient(Client[FedProxOptions]):
            def adjust_gradient(self, trainer: LocalTrainer) -> None:
                w = trainer.received[: trainer.layout.trainable]
                trainer.gradient.add_(trainer.weights - w, alpha=self.options.mu)
    """

    def _state(self) -> dict[str, Any]:
        return {}  # workers have copies of this object, so only the trainer's `client_state` lasts

    def state_shapes(self, layout: Layout) -> Shapes:
        """Return names and shapes of tensors that each client keeps between rounds, zeros at first.

        Args:
            layout: The layout of the models, for tensors as long as a row or a part of it.
        """
        return {}

    def upload_shapes(self, layout: Layout) -> Shapes:
        """Return names and shapes of tensors that a client returns beside its model.

        Args:
            layout: The layout of the models.
        """
        return {}

    def min_examples(self) -> int:
        """Return how many samples a client needs so that its uploads reveal none of them.

        Real sites with fewer samples do not train; simulations ignore it.
        """
        return 1

    def personal_columns(self, layout: Layout) -> list[slice]:
        """Return the columns of a row that never travel. They start as in the initial model.

        Args:
            layout: The layout of the models. `layout.layer_columns()` gives the columns of each layer.
        """
        return []

    def validation_fraction(self) -> float:
        """Return the share of samples to hold out if the setting `validation` is 0."""
        return 0.0

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        """Train `trainer.row`. Code before, between and after the `yield`s runs too.

        Args:
            trainer: The client's model, samples and state.

        Yields:
            Steps that the engine runs.
        """
        yield LocalSteps(self.training_step)

    def personalize(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        """Turn the global model in `trainer.row` into this client's own model. Written like `train`.

        Personal columns already hold the client's own values. There are no extras. The result is used for evaluation
        only.

        Args:
            trainer: The client's model, samples and state.

        Yields:
            Steps that the engine runs.
        """
        yield from ()

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        """Train on one batch.

        Args:
            trainer: The client's model, samples and state.
            batch: Network inputs and targets.

        Returns:
            The loss.
        """
        loss = trainer.loss(batch)
        trainer.backward(loss)
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        """Change `trainer.gradient` in place before the optimizer step.

        Args:
            trainer: The client's model, samples and state.
        """


class Extras(MethodPart[O], ABC):
    """Tensors that travel beside the models, on the server's side.

    Clients read them in `trainer.extras`, and return tensors in `trainer.uploads`.

    Example:
        class RoundNumber(Extras[Options]):
            def send_to_client(self, round: int, client_id: int) -> dict[str, Tensor]:
                return {"round": torch.tensor([float(round)])}

            def receive_update(self, round: int, update: ClientUpdate) -> None:
                pass  # clients return nothing
    """

    _sees_updates = ("receive_update",)

    @abstractmethod
    def send_to_client(self, round: int, client_id: int) -> Mapping[str, Tensor]:
        """Return the tensors, by name, that this client receives beside its model.

        Args:
            round: The round, from 0.
            client_id: The client.
        """

    @abstractmethod
    def receive_update(self, round: int, update: ClientUpdate) -> None:
        """Take the extras of one accepted update. Updates come in the order of the tasks.

        Args:
            round: The round, from 0.
            update: The update. Its tensors are valid during this call only, so copy what you keep.
        """

    def end_round(self, round: int) -> None:
        """Update what the next round sends, after all updates.

        Args:
            round: The round that ends, from 0.
        """


class Refiner(MethodPart[O], ABC):
    """Server work that improves the new models before the next round.

    Example:
        class ShrinkRefiner(Refiner[Options]):
            def refine(self, round: int, server: Server[Any]) -> None:
                server.models()[:, : self.context.layout.trainable].mul_(0.999)
    """

    needs = "mean"
    _sees_updates = ("receive_update",)

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        """See one accepted update, in the order of the tasks.

        Args:
            round: The round, from 0.
            update: The update. Its tensors are valid during this call only, so copy what `refine` needs.
        """

    @abstractmethod
    def refine(self, round: int, server: Server[Any]) -> None:
        """Improve each row of `server.models()` in place.

        Args:
            round: The round, from 0.
            server: The server, after it aggregated the updates of this round.
        """
