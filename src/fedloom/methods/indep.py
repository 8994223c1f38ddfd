"""Indep: K models travel from client to client and are never mixed.

The baseline of Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination", KDD
2024: FedMR without recombination. The global model is the uniform mean of the models.
"""

from torch import Tensor

from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS, MultiModelServer


@register("indep", reference="Hu et al., KDD 2024", defaults=MULTI_MODEL_DEFAULTS)
class IndepServer(MultiModelServer[Options]):
    """Keep K models and never mix them; their mean is the global model (FedMR's baseline)."""

    needs_reason = "keeps models that are never averaged in training"

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        w.copy_(v)
