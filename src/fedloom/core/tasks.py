"""Tasks for clients, memory for their results, and the updates or failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of tensors that travel beside a model or stay with a client."""


@dataclass(frozen=True)
class ClientTask:
    """A task for one client: train this model. `Server.dispatch` returns one for each client.

    Example:
        ClientTask(client_id, self.bank.rows[i], model_index=i)
    """

    client_id: int
    row: Tensor
    """The model to train. It must not change before the round ends."""
    model_index: int = 0
    """Which of the server's models this is, for servers that keep several."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors sent with the model; `Extras.send_to_client` adds to them."""
    round: int = -1
    """The round, from 0, which `RoundRunner` sets; -1 before that."""
    result_row: Tensor | None = None
    """Where an engine may write the client's model, so that the server need not copy it. Each task needs a row of its
    own. It holds a model only if the update arrives: a client that fails may leave anything."""

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.extras)


@dataclass(frozen=True)
class TaskMemory:
    """Where a client's result is written; an engine lends it for one task."""

    row: Tensor
    """Memory for the client's model."""
    client_state: dict[str, Tensor] = field(default_factory=dict)
    """Memory for the client state, with the values of the last visit."""
    uploads: dict[str, Tensor] = field(default_factory=dict)
    """Memory for the tensors that the client returns with the model, zeros at first."""
    first_visit: bool = True
    """Whether this client trains for the first time."""


@dataclass(frozen=True)
class ClientUpdate:
    """The result of one client's training.

    Its tensors are valid only until the next update is read. Clone or copy what you keep.
    """

    task: ClientTask
    row: Tensor
    """The trained model."""
    num_examples: int
    """Number of samples that the client trained on."""
    loss: float
    """Mean training loss over the last epoch; NaN if there was no step."""
    steps: int
    """Number of training steps."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the client sends with the model; it filled them as `trainer.uploads`."""
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    """The client state to store if the update is accepted. It is never sent."""
    finite: bool = False
    """Whether the engine has already checked that every number is finite."""
    exchanged: bool = False
    """Whether the clients have already exchanged layers of their models (FedMR)."""

    @property
    def client_id(self) -> int:
        return self.task.client_id

    @property
    def model_index(self) -> int:
        return self.task.model_index

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.extras)


@dataclass(frozen=True)
class ClientFailure:
    """A client that sent no update, or whose update was rejected, with the reason."""

    task: ClientTask
    reason: str
    permanent: bool = False
    """Whether it would fail again if the round were repeated."""
    was_sent: bool = True
    """Whether the model was sent to it."""


def _nbytes(row: Tensor, extras: Mapping[str, Tensor]) -> int:
    return row.nbytes + sum(tensor.nbytes for tensor in extras.values())
