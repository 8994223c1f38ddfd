"""NaiveMix: clients mix their samples with means of other clients' samples.

Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021, the simpler of the
paper's two methods. Means (x_, y_) are shared and pooled as in fedmix.py; a step is plain mixup with one of them:

    (1 - lambda) CE(f(x'), y) + lambda CE(f(x'), y_),        x' = (1 - lambda) x + lambda x_
"""

from torch import Tensor

from fedloom.bench import Batch, Bench
from fedloom.methods.catalogue import Method, register
from fedloom.methods.fedmix import FedMixOptions, MixCompanion, MixLocal


class NaiveMixLocal(MixLocal):
    """FedMix's clients with plain mixup."""

    def mixed(self, bench: Bench, batch: Batch, x_: Tensor, y_: Tensor) -> Tensor:
        lam, criterion = self.options.lam, self.context.criterion
        output = bench.module((1 - lam) * batch.x + lam * x_)
        return (1 - lam) * criterion(output, batch.y) + lam * criterion(output, y_)


register(
    Method(
        name="naivemix",
        summary="mix samples with means of others' samples",
        reference="Yoon et al., ICLR 2021",
        options=FedMixOptions,
        local=NaiveMixLocal,
        companion=MixCompanion,
        neutral={"lam": 0.0},
        models_sent="2K + means",
        needs_each="hands means of each client's samples to the others",
        server_keeps="model, means",
    )
)
