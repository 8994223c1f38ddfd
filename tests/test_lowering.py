"""Networks that compute in another type while they train."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fedloom.lowering import lower


def test_a_copy_of_a_network_in_a_lower_type_computes_with_its_own_weights() -> None:
    module = lower(nn.Linear(3, 2), torch.device("cpu"), torch.bfloat16)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()  # type: ignore[union-attr, operator]
        other.bias.fill_(0.5)  # type: ignore[union-attr, operator]
    x = torch.ones(1, 3)
    assert other(x).tolist() == [[0.5, 0.5]]
    assert module(x).tolist() != [[0.5, 0.5]]
    assert other(x).dtype is torch.float32
    module.eval()
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))  # type: ignore[arg-type]
    assert other.training
