"""What passes between server and clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of tensors that travel beside a model or stay with a client."""


@dataclass(frozen=True)
class ClientTask:
    """What the server asks of one client: train this model."""

    client: int
    row: Tensor
    """The model. Nobody changes it while the round lasts."""
    slot: int = 0
    """Which of the server's models this is, for servers that keep several."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What travels down beside the model."""

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.extras)


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sends back.

    The tensors are lent: they hold only until the next update is taken, so copy what you keep.
    """

    job: ClientTask
    row: Tensor
    samples: int
    """How many samples the client trained on."""
    loss: float
    """Mean training loss over the client's last epoch."""
    steps: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What travels up beside the model."""
    home: Mapping[str, Tensor] = field(default_factory=dict)
    """What the client will keep at home if its update is accepted. It does not travel."""
    finite: bool = False
    """Whether the engine has looked already and found every number in it finite."""
    exchanged: bool = False
    """Whether the clients have exchanged layers of their models already (FedMR)."""

    @property
    def client(self) -> int:
        return self.job.client

    @property
    def slot(self) -> int:
        return self.job.slot

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.extras)


@dataclass(frozen=True)
class ClientFailure:
    """A client that did not answer, or whose answer was refused, and why."""

    job: ClientTask
    reason: str
    for_good: bool = False
    """Whether it will not answer if the round is played again either."""
    reached: bool = True
    """Whether it was sent its model."""


def _nbytes(row: Tensor, extras: Mapping[str, Tensor]) -> int:
    return row.nbytes + sum(tensor.nbytes for tensor in extras.values())
