"""Stacked recurrent networks with dropout between their layers, on a GPU.

cuDNN computes all layers in one call. Its dropout has a state of its own, one for the whole GPU, and ignores
generators. Its draws would depend on which clients trained before, and slots that train at once or replay graphs would
disturb each other. So in training the layers of such a network run one by one, still in cuDNN, with torch's own dropout
between them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

KINDS = (nn.RNN, nn.GRU, nn.LSTM)


def split_recurrent_layers(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module; on a GPU, recurrent networks with dropout between layers run layer by layer."""
    for network in module.modules() if device.type == "cuda" else ():
        if isinstance(network, nn.RNNBase) and _is_stacked(network):
            layers = [_layer(network, number) for number in range(network.num_layers)]
            # Neither a closure nor a submodule: a copy must compute with its own weights, and the state dict must not
            # change.
            network.forward = partial(_forward, network, network.forward, layers)
    return module


def _is_stacked(network: nn.RNNBase) -> bool:
    """Return whether it is torch's own class, has dropout between layers, and owns its weights."""
    usual = type(network) in KINDS and all(name in network._parameters for name in network._flat_weights_names)
    return usual and network.num_layers > 1 and network.dropout > 0


def _layer(network: nn.RNNBase, number: int) -> nn.RNNBase:
    """Return one layer as a network of its own, with the same weights."""
    ways = 2 if network.bidirectional else 1
    width = network.input_size if not number else (network.proj_size or network.hidden_size) * ways
    given: dict[str, Any] = {"bias": network.bias, "batch_first": network.batch_first, "device": "meta"}
    given["bidirectional"] = network.bidirectional
    if isinstance(network, nn.LSTM):
        given["proj_size"] = network.proj_size
    if isinstance(network, nn.RNN):
        given["nonlinearity"] = network.nonlinearity
    kind: Any = type(network)
    layer: nn.RNNBase = kind(width, network.hidden_size, **given)
    for name, _ in list(layer.named_parameters()):
        setattr(layer, name, getattr(network, name.replace("_l0", f"_l{number}")))
    # A layer that finds new weights moves them next to each other into new memory. Let it find them now: later they
    # are views of a model's row and must stay there.
    layer._init_flat_weights()
    return layer


def _forward(
    network: nn.RNNBase, forward: Callable[..., Any], layers: Sequence[nn.RNNBase], x: Any, hx: Any = None
) -> Any:
    if not network.training:
        return forward(x, hx)
    ways, ends = 2 if network.bidirectional else 1, list[Any]()
    for number, layer in enumerate(layers):
        if number:
            x = _dropped(x, network.dropout)
        here = slice(number * ways, (number + 1) * ways)
        start = None if hx is None else hx[here] if isinstance(hx, Tensor) else tuple(part[here] for part in hx)
        layer.training = True
        x, end = layer(x, start)
        ends.append(end)
    if isinstance(ends[0], Tensor):
        return x, torch.cat(ends)
    return x, tuple(torch.cat(parts) for parts in zip(*ends, strict=True))


def _dropped(x: Any, share: float) -> Any:
    if isinstance(x, PackedSequence):
        return x._replace(data=F.dropout(x.data, share))
    return F.dropout(x, share)
