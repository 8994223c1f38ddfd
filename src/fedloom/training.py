"""How a client trains: the options of ordinary local training."""

from typing import Literal

from pydantic import Field, model_validator

from fedloom.optim import SGD, Adam, Steady
from fedloom.settings import MOST, Settings


class Training(Settings):
    """Ordinary local training."""

    epochs: int = Field(2, ge=0, le=MOST)
    """passes of a client over its own samples in one round"""
    steps: int | None = Field(None, ge=0, le=MOST)
    """steps of a client in one round, instead of epochs"""
    batch_size: int = Field(20, ge=0, le=MOST)
    """samples in a batch; 0 takes all of a client's samples at once"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd or adam; a new one for each client and round, unless --keep-optimizer is given"""
    keep_optimizer: bool = False
    """each client continues with the momentum (sgd) or moments (adam) of the last round that it took part in"""
    lr: float = Field(0.05, ge=0)
    """learning rate of the clients"""
    lr_decay: float = Field(1.0, gt=0)
    """factor on the learning rate after every round"""
    momentum: float = Field(0.0, ge=0, lt=1)
    """momentum of sgd"""
    nesterov: bool = False
    """Nesterov's form of momentum"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay, added to the gradient"""
    clip: float | None = Field(None, gt=0)
    """largest norm of a gradient; longer ones are scaled down"""
    augment: str = "none"
    """random changes of training images: none, flip, crop, crop+flip"""
    statistics: Literal["running", "estimated"] = "running"
    """batch norm's statistics that a client sends: as training left them, or estimated anew from its samples"""
    validation: float = Field(0.0, ge=0, lt=1)
    """share of each client's samples kept out of training, for methods that use it to choose models"""

    @model_validator(mode="after")
    def _remembers(self) -> "Training":
        if self.keep_optimizer and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("keep_optimizer needs something to keep: optimizer adam, or a momentum above 0, not 0.0.")
        return self

    def make_optimizer(self) -> Steady:
        """A new optimiser as these options ask for."""
        if self.optimizer == "adam":
            return Adam(weight_decay=self.weight_decay)
        return SGD(self.momentum, self.nesterov, self.weight_decay)

    def lr_at(self, round: int) -> float:
        """The learning rate in round `round` (from 0)."""
        return float(self.lr * self.lr_decay**round)
