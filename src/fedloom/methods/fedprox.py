"""FedProx: a proximal term keeps each client close to the model that it received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. A client minimizes

    f_k(v) + (mu / 2) ||v - w||^2                          (Eq. 2)

over the trainable parameters v; w is the model it received. The paper draws clients in proportion to their samples and
then averages uniformly. Like the papers that compare with it, fedloom draws uniformly and averages by samples. Some
public code omits the 1/2 or the square; fedloom does not. The authors tune mu in {0.001, 0.01, 0.1, 0.5, 1}; FedCross
and FedMR use 0.01 for CIFAR-10.
"""

from pydantic import Field

from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.training.trainer import LocalTrainer


class FedProxOptions(Options):
    mu: float = Field(0.01, ge=0)
    """weight of the proximal term; 0 is FedAvg"""


@register("fedprox", reference="Li et al., MLSys 2020", neutral={"mu": 0.0})
class FedProxClient(Client[FedProxOptions]):
    """Add a proximal term that keeps each client close to the model it received."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        if mu := self.options.mu:
            w = trainer.received[: trainer.layout.trainable]
            trainer.gradient.add_(trainer.weights - w, alpha=mu)  # the gradient of Eq. 2
