"""FedNova: divide each client's update by its amount of local work.

So clients with more steps do not count more.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020. The
update w_k - w of a client after tau_k steps is -eta times a sum of its gradients, weighted by a vector a_k. With the
client's share p_k of the samples,

    w <- w + tau_eff sum_k p_k (w_k - w) / |a_k|,       tau_eff = sum_k p_k |a_k|

|a_k| is the sum of the entries of a_k. For SGD it is tau_k, for SGD with momentum rho

    |a_k| = sum_{j=1..tau_k} (1 - rho^j) / (1 - rho)

The server computes it from the number of local steps that each client reports. tau_eff is that of the authors' code:
clients with equally many steps give FedAvg's mean, up to rounding, with any momentum. For Nesterov momentum their code
takes the same a_k; fedloom takes tau_k + rho |a_k|, which follows from its steps. FedProx has an a_k of its own in the
paper, which fedloom does not use. Adam's steps are no weighted sum of gradients, so it is refused.

The formula is a step from w to the mean of the w_k with weights n_k / |a_k|. Batch-norm statistics are that mean.
"""

from collections.abc import Iterator

from torch import Tensor

from fedloom.config import TrainingConfig
from fedloom.core.tasks import ClientUpdate
from fedloom.errors import InputError
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import AveragingServer


@register("fednova", reference="Wang et al., NeurIPS 2020")
class FedNovaServer(AveragingServer[Options]):
    """Divide each client's update by its number of local steps."""

    needs_reason = "divides each client's update by its number of local steps"

    def start(self) -> None:
        if self.context.config.optimizer != "sgd":
            raise InputError(
                f"fednova needs optimizer sgd, not {self.context.config.optimizer}: it divides an update by the weight "
                "that its gradients have in it."
            )
        self._n_and_a: list[tuple[int, float]] = []
        self._tau_eff: float | None = None

    def weight(self, update: ClientUpdate) -> float:
        return update.num_examples / fednova_gradient_weight(update.steps, self.context.config)

    def observe(self, round: int, update: ClientUpdate) -> None:
        self._n_and_a.append((update.num_examples, fednova_gradient_weight(update.steps, self.context.config)))

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        n = sum(n for n, _ in self._n_and_a)
        self._tau_eff = sum(n_k * a_k for n_k, a_k in self._n_and_a) / n
        step = self._tau_eff * sum(n_k / a_k for n_k, a_k in self._n_and_a) / n
        return old + step * (mean - old)

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._n_and_a, self._tau_eff = [], None
        super().aggregate(round, updates)

    def diagnostics(self) -> dict[str, float]:
        return {} if self._tau_eff is None else {"tau_eff": self._tau_eff}


def fednova_gradient_weight(steps: int, config: TrainingConfig) -> float:
    """Return |a|, the sum of the weights of the gradients in the update after `steps` steps of SGD."""
    tau, rho = max(steps, 1), config.momentum  # no step is no update, which may be divided by anything
    a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    return tau + rho * a if config.nesterov else a
