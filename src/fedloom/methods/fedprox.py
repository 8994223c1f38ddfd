"""FedProx: each client is pulled back to the model it received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. A client minimises

    f_k(v) + (mu / 2) ||v - w||^2

over the trainable parameters v, with w the model it received. The paper draws clients in proportion to their
samples and then averages uniformly; like the papers that measure against it, we draw uniformly and average by
samples. Some public code leaves out the 1/2 or the square; neither is done here. The authors name no universal mu
and tune it in {0.001, 0.01, 0.1, 0.5, 1}; FedCross and FedMR use 0.01 for CIFAR-10.
"""

from pydantic import Field

from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalTrainer


class FedProxOptions(Options):
    mu: float = Field(0.01, ge=0)
    """strength of the pull to the received model; 0 is FedAvg"""


class FedProxClient(Client[FedProxOptions]):
    """Ordinary training plus the gradient of the proximal term."""

    def correct(self, bench: LocalTrainer) -> None:
        if mu := self.options.mu:
            w = bench.received[: bench.layout.trainable]
            bench.gradient.add_(bench.weights - w, alpha=mu)


register(
    Method(
        name="fedprox",
        summary="pull each client back to the model it received",
        reference="Li et al., MLSys 2020",
        options=FedProxOptions,
        local=FedProxClient,
        neutral={"mu": 0.0},
        models_sent="2K",
    )
)
