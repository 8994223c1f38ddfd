"""ABAVG: weight each client model by its accuracy on the server's samples.

These samples are labeled.

Xiao et al., "A novel server-side aggregation strategy for federated learning in non-i.i.d. situations", ISPDC 2021.
With a_k the accuracy of client k's model on all samples of the server,

    w <- sum_k (a_k / sum_j a_j) w_k.

It is unknown whether the paper also multiplies a_k by the client's number of samples. Public code does not; the option
`samples` does. A model with accuracy 0 has weight 0. If all have accuracy 0, they count as if it were equal. Public
code (DynaFed's) uses the accuracy on the last batch only; fedloom uses all samples.
"""

from collections.abc import Iterator

import torch

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientUpdate
from fedloom.methods._support.distillation import DistillationData
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import AveragingServer


class ABAVGOptions(Options):
    samples: bool = False
    """weight by accuracy times the client's number of samples, and not by accuracy alone"""


@register("abavg", reference="Xiao et al., ISPDC 2021", extra_compute="server tests", server_data="labels")
class ABAVGServer(AveragingServer[ABAVGOptions]):
    """Average by the accuracy of each client's model on the server's samples."""

    needs_reason = "tests each client's model on samples of its own"

    def start(self) -> None:
        self._proxy = DistillationData(self.context, "abavg")
        self._accuracies: list[float] = []

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._accuracies = []
        by_accuracy, alike = WeightedMean(self.context.layout), WeightedMean(self.context.layout)
        y = self._proxy.samples.y
        for update in updates:
            count = update.num_examples if self.options.samples else 1
            right = int(torch.count_nonzero(self._proxy.outputs(update.row).argmax(1) == y))
            by_accuracy.add(update.row, right * count)
            alike.add(update.row, count)
            self._accuracies.append(right / len(y))
        if not by_accuracy.write_to(self.bank.rows[0]):
            alike.write_to(self.bank.rows[0])

    def diagnostics(self) -> dict[str, float]:
        if not self._accuracies:
            return {}
        return {"lowest accuracy": min(self._accuracies), "highest accuracy": max(self._accuracies)}
