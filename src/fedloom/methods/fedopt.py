"""FedAvgM, FedAdagrad, FedAdam and FedYogi: an optimizer on the server.

The step from the old model to the mean is its gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021. With w the old model and Delta the mean of all w_k - w,

    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                    (FedAdagrad)
    v <- beta2 v + (1 - beta2) Delta^2                  (FedAdam)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)      (FedYogi)
    w <- w + eta m / (sqrt(v) + tau)

There is no bias correction. m starts at 0 and v at tau^2, the smallest value that the paper allows. It tunes eta, here
`server_lr`, for every task; the defaults are a start. beta1, beta2 and tau are those of its experiments. Its algorithm
averages uniformly, its experiments by samples; `weighting` selects one.

FedAvgM is SGD with momentum on the server. Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", arXiv 2019:

    m <- beta m + Delta,        w <- w + eta m

All moments cover trainable parameters only; batch-norm statistics are the plain mean.
"""

from pydantic import Field
from torch import Tensor

from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.registry import register


class FedAvgMOptions(FedAvgOptions):
    momentum: float = Field(0.9, ge=0, lt=1)
    """momentum on the server (beta); 0 is FedAvg"""


@register("fedavgm", reference="Hsu et al., arXiv 2019", neutral={"momentum": 0.0})
class FedAvgMServer(FedAvgServer[FedAvgMOptions]):
    """Momentum on the server."""

    def start(self) -> None:
        self.m = self.zeros()

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        if not self.options.momentum:
            return super().next_model(round, old, mean)
        self.m.mul_(self.options.momentum).add_(mean - old)
        return old + self.options.server_lr * self.m


class FedAdagradOptions(FedAvgOptions):
    server_lr: float = Field(0.1, gt=0)
    """learning rate of the server (eta)"""
    beta1: float = Field(0.0, ge=0, lt=1)
    """decay of the first moment; the paper's Adagrad has none"""
    tau: float = Field(1e-3, gt=0)
    """degree of adaptivity, added to the root of the second moment; steps are more alike if it is smaller"""


@register("fedadagrad", reference="Reddi et al., ICLR 2021")
class FedAdagradServer(FedAvgServer[FedAdagradOptions]):
    """Adagrad on the server."""

    def start(self) -> None:
        self.m, self.v = self.zeros(), self.zeros() + self.options.tau**2

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        o, delta = self.options, mean - old
        self.m = o.beta1 * self.m + (1 - o.beta1) * delta
        self.v = self.v + delta.square()
        return old + o.server_lr * self.m / (self.v.sqrt() + o.tau)


class FedAdamOptions(FedAvgOptions):
    server_lr: float = Field(0.01, gt=0)
    """learning rate of the server (eta)"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """decay of the first moment"""
    beta2: float = Field(0.99, ge=0, lt=1)
    """decay of the second moment"""
    tau: float = Field(1e-3, gt=0)
    """degree of adaptivity, added to the root of the second moment; steps are more alike if it is smaller"""


@register("fedadam", reference="Reddi et al., ICLR 2021")
class FedAdamServer(FedAvgServer[FedAdamOptions]):
    """Adam on the server."""

    def start(self) -> None:
        self.m, self.v = self.zeros(), self.zeros() + self.options.tau**2

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        o, delta = self.options, mean - old
        self.m = o.beta1 * self.m + (1 - o.beta1) * delta
        self.v = o.beta2 * self.v + (1 - o.beta2) * delta.square()
        return old + o.server_lr * self.m / (self.v.sqrt() + o.tau)


@register("fedyogi", reference="Reddi et al., ICLR 2021")
class FedYogiServer(FedAdamServer):
    """Yogi on the server.

    v falls more slowly than Adam's if the steps become small.
    """

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        o, delta = self.options, mean - old
        self.m = o.beta1 * self.m + (1 - o.beta1) * delta
        self.v = self.v - (1 - o.beta2) * delta.square() * (self.v - delta.square()).sign()
        return old + o.server_lr * self.m / (self.v.sqrt() + o.tau)
