"""FedBN: batch-norm layers stay with each client.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Clients whose inputs look different need different normalization. So weight, bias and running statistics of every
batch-norm layer belong to the client and never travel. FedAvg averages all else.

Batch-norm layers are found by their type: in a ResNet one of them is called `downsample.1`, which a search for "bn" in
the name misses. A network without batch norm is trained as by FedAvg.

Not specified in the paper: a client that has never trained starts from the initial batch norm. The global model has the
mean of the clients' batch norms, weighted by samples; each client is evaluated with its own. The paper's clients have
equal numbers of samples; here they count by samples unless `fedavg.weighting` is `uniform`.
"""

from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.layout import Layout
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register


@register(
    "fedbn",
    reference="Li et al., ICLR 2021",
    models_sent="2K - norms",
    new_client="A new client gets the global model, whose batch norms are the mean of the trained clients'.",
)
class FedBNClient(Client[Options]):
    """Batch-norm layers stay with each client."""

    def start(self) -> None:
        modules = self.context.make_model().named_modules(remove_duplicate=False)
        self._norms = {name for name, module in modules if isinstance(module, _BatchNorm)}

    def personal_columns(self, layout: Layout) -> list[slice]:
        columns: list[slice] = []
        for entry in layout.entries:
            if entry.layer in self._norms:
                if columns and columns[-1].stop == entry.columns.start:  # few long copies instead of many short ones
                    columns[-1] = slice(columns[-1].start, entry.columns.stop)
                else:
                    columns.append(entry.columns)
        return columns
