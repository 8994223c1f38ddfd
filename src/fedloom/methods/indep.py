"""Indep: K models travel from client to client and are never mixed.

The baseline of Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination", KDD
2024: FedMR without recombination. The global model is the uniform mean of the models.
"""

from torch import Tensor

from fedloom.methods.base import Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS, MultiModelServer


class IndepServer(MultiModelServer[Options]):
    """Server with K models that are never mixed."""

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        w.copy_(v)


register(
    Method(
        name="indep",
        summary="keep K models and never mix them; their mean is the global model (FedMR's baseline)",
        reference="Hu et al., KDD 2024",
        server=IndepServer,
        defaults=MULTI_MODEL_DEFAULTS,
        models_sent="2K",
        uses_single_updates="keeps models that are never averaged in training",
        server_state="K models",
    )
)
