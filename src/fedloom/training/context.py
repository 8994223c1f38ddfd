"""TrainingContext: what all trainers of a run share; LocalSteps.

It has the network, the loss, the settings, and the types of a step and a loss.
"""

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
"""A loss: (outputs of the network, targets) -> mean over the batch."""

PERSONAL_KEY = "@personal"
"""The key of the personal columns of the model in the client state."""

OPTIMIZER_PREFIX = "@optimizer "
"""The prefix of the optimizer state's keys in the client state."""


Step = Callable[["LocalTrainer", Batch], Tensor]
"""A training step: (trainer, batch) -> loss."""


@dataclass(frozen=True)
class TrainingContext:
    """What all trainers of a run share."""

    model: nn.Module
    layout: Layout
    criterion: Criterion
    transform: InputTransform
    config: TrainingConfig
    rng_streams: RngStreams
    classes: int = 0
    channels_last: bool = False
    augment: Augment | None = None
    upload_shapes: Shapes = field(default_factory=dict)
    """Tensors that clients send with their model."""
    state_shapes: Shapes = field(default_factory=dict)
    """Tensors that each client keeps between rounds."""
    autocast: torch.dtype | None = None
    """The dtype in which networks compute in training, if it is not that of the models."""
    min_examples: int = 1
    """Samples that a client needs before its uploads are safe to share; real sites with fewer do not train."""
    personal_columns: Sequence[slice] = ()
    """Columns of the model that are never sent. Each client keeps its own in the client state, under `PERSONAL_KEY`."""
    initial_buffers: Mapping[str, Tensor] | None = None
    """Initial values of non-persistent buffers; by default those that `model` has now."""

    def __post_init__(self) -> None:
        if self.initial_buffers is None:
            object.__setattr__(self, "initial_buffers", copy_non_persistent_buffers(self.model))
