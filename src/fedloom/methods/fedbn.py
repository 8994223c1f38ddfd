"""FedBN: batch norm stays with each client.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Clients whose inputs look different need normalising differently. So the weight, bias and running statistics of every
batch norm are each client's own and never travel; all else is averaged as FedAvg does.

Batch norms are found by their type: in a ResNet one of them is called `downsample.1`, which a search for "bn" in the
name misses. A network without batch norm is trained by FedAvg.

Where the paper is silent: a client that was never asked has no batch norm of its own, and starts from the initial one.
The deployed model has the mean of the clients' batch norms, by samples; each client is scored with its own. The paper's
clients have equally many samples and equal weights; here they count by samples unless `fedavg.weighting` is `uniform`.
"""

from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.layout import Layout
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import Method, register


class FedBNClient(Client[Options]):
    """Ordinary training; what belongs to batch norms is not sent."""

    def __init__(self, context: MethodContext, options: Options) -> None:
        super().__init__(context, options)
        modules = context.make_module().named_modules(remove_duplicate=False)
        self._norms = {name for name, module in modules if isinstance(module, _BatchNorm)}

    def stays_home(self, layout: Layout) -> list[slice]:
        columns: list[slice] = []
        for entry in layout.entries:
            if entry.unit in self._norms:
                if columns and columns[-1].stop == entry.columns.start:  # few long copies instead of many short ones
                    columns[-1] = slice(columns[-1].start, entry.columns.stop)
                else:
                    columns.append(entry.columns)
        return columns


register(
    Method(
        name="fedbn",
        summary="each client keeps batch norm to itself",
        reference="Li et al., ICLR 2021",
        local=FedBNClient,
        models_sent="2K - norms",
        client_keeps="batch norms",
    )
)
