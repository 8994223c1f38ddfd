"""What all benches of a run have in common, and the passes that a `Local` asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.batches import Batch
from fedloom.buffers import aside
from fedloom.data import Augment, Prepare
from fedloom.exchange import Shapes
from fedloom.rows import Layout
from fedloom.streams import Streams
from fedloom.training import Training

if TYPE_CHECKING:
    from fedloom.bench import Bench

Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss: (output of the network, targets) -> mean over the batch."""

STAYS = "@stays"
"""The name under which a client keeps the columns of the model that stay with it."""

OPTIMIZER = "@optimizer "
"""How the names begin under which a client keeps what its optimiser knows."""


@dataclass(frozen=True)
class Pass:
    """A stretch of local training: these epochs or steps (by default the run's own) with this step.

    Epochs begin anew; steps go on in the epoch that the steps before them left, so that a training may be cut into
    passes of some steps and see the same batches.
    `step(bench, batch)` returns the loss. It works only on what lies on the bench, so that an engine may
    interleave many clients, or record the step once and replay it.
    """

    step: "Step"
    epochs: int | None = None
    steps: int | None = None


Step = Callable[["Bench", Batch], Tensor]
"""One step of local training: returns the loss."""


@dataclass(frozen=True)
class Workshop:
    """What all benches of a run have in common."""

    module: nn.Module
    layout: Layout
    criterion: Criterion
    prepare: Prepare
    training: Training
    streams: Streams
    classes: int = 0
    channels_last: bool = False
    augment: Augment | None = None
    uploads: Shapes = field(default_factory=dict)
    """Tensors that clients send up beside their model."""
    home: Shapes = field(default_factory=dict)
    """Tensors that each client keeps between rounds."""
    autocast: torch.dtype | None = None
    """The type in which networks compute while they train, where it is not that of the models."""
    fewest: int = 1
    """Samples that a client must have where nobody else is to see one of them, for what it sends beside its model."""
    stays_home: Sequence[slice] = ()
    """Columns of the model that do not travel; each client keeps its own, as the tensor STAYS of its home."""
    fresh: Mapping[str, Tensor] | None = None
    """The buffers that are no part of the model, as the network was built, which it is when this is made."""

    def __post_init__(self) -> None:
        if self.fresh is None:
            object.__setattr__(self, "fresh", aside(self.module))


def put_columns(row: Tensor, stays_home: Sequence[slice], values: Tensor) -> None:
    """Put what a client keeps as STAYS into the columns of `row` where it belongs."""
    start = 0
    for columns in stays_home:
        size = columns.stop - columns.start
        row[columns] = values[start : start + size]
        start += size
