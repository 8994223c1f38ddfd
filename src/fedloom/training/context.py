"""TrainingContext: what an engine needs to train and evaluate clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import Shapes
from fedloom.data import Augment, FederatedDataset
from fedloom.data.held_out import HeldOutClients
from fedloom.training.batches import Batch
from fedloom.training.module_buffers import copy_non_persistent_buffers

if TYPE_CHECKING:
    from fedloom.training.trainer import LocalSteps, LocalTrainer


Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss: (outputs of the network, targets) -> mean over the batch."""

PERSONAL_KEY = "@personal"
"""The key of the personal columns of the model in the client state."""

OPTIMIZER_PREFIX = "@optimizer "
"""The prefix of the optimizer state's keys in the client state."""


Step = Callable[["LocalTrainer", Batch], Tensor]
"""A training step: (trainer, batch) -> loss."""

Train = Callable[["LocalTrainer"], Iterator["LocalSteps"]]
"""The type of `Client.train`."""


@dataclass(frozen=True)
class ClientProgram:
    """What clients do in a run, and which tensors they keep and send."""

    train: Train
    personalize: Train | None = None
    """`Client.personalize`; None if the method is not personalized."""
    make_copy: Callable[[], Train] | None = None
    """Returns the `train` of a new `Client`. Clients that train at once in one process must not share attributes."""
    upload_shapes: Shapes = field(default_factory=dict)
    """Tensors that clients send with their model."""
    state_shapes: Shapes = field(default_factory=dict)
    """Tensors that each client keeps between rounds."""
    personal_columns: Sequence[slice] = ()
    """Columns of the model that are never sent. Each client keeps its own in the client state, under `PERSONAL_KEY`."""
    min_examples: int = 1
    """Samples that a client needs before its uploads are safe to share; real sites with fewer do not train."""


@dataclass(frozen=True)
class Numerics:
    """How networks get their inputs and compute in training."""

    channels_last: bool = False
    autocast: torch.dtype | None = None
    """The dtype in which networks compute in training, if it is not that of the models."""
    augment: Augment | None = None


@dataclass(frozen=True)
class TrainingContext:
    """What an engine needs to train clients and to evaluate models. All its trainers share it."""

    model: nn.Module
    layout: Layout
    criterion: Criterion
    config: TrainingConfig
    rng_streams: RngStreams
    data: FederatedDataset
    """The samples of the clients and of the test set, with their number of classes and their transform."""
    client: ClientProgram
    numerics: Numerics = field(default_factory=Numerics)
    held_out: HeldOutClients | None = None
    """Clients that never train. Their ids follow those of the clients in `data`."""
    initial_buffers: Mapping[str, Tensor] | None = None
    """Initial values of non-persistent buffers; by default those that `model` has now."""

    def __post_init__(self) -> None:
        if self.initial_buffers is None:
            object.__setattr__(self, "initial_buffers", copy_non_persistent_buffers(self.model))
