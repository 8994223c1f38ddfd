"""What all benches of a run have in common, and the passes that a `Local` asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import Shapes
from fedloom.data import Augment, InputTransform
from fedloom.training.batches import Batch
from fedloom.training.module_buffers import copy_non_persistent_buffers

if TYPE_CHECKING:
    from fedloom.training.trainer import LocalTrainer


Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss: (output of the network, targets) -> mean over the batch."""

PERSONAL_KEY = "@stays"
"""The name under which a client keeps the columns of the model that stay with it."""

OPTIMIZER_PREFIX = "@optimizer "
"""How the names begin under which a client keeps what its optimiser knows."""


Step = Callable[["LocalTrainer", Batch], Tensor]
"""One step of local training: returns the loss."""


@dataclass(frozen=True)
class TrainingContext:
    """What all benches of a run have in common."""

    module: nn.Module
    layout: Layout
    criterion: Criterion
    prepare: InputTransform
    training: TrainingConfig
    streams: RngStreams
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
            object.__setattr__(self, "fresh", copy_non_persistent_buffers(self.module))
