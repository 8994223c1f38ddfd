"""Recurrent networks with dropout between their layers, on a GPU.

cuDNN computes all layers in one go, and its dropout has a state of its own, one for the whole GPU: it knows nothing of
generators, so its draws would depend on which clients were trained before, and slots that train side by side, or replay
what was recorded, would disturb each other. So while such a network trains its layers are computed one by one, still by
cuDNN, and dropout between them is that of everybody else.
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
    """The module; on a GPU its recurrent networks are computed layer by layer where there is dropout between them."""
    for network in module.modules() if device.type == "cuda" else ():
        if isinstance(network, nn.RNNBase) and _is_stacked(network):
            layers = [_layer(network, number) for number in range(network.num_layers)]
            # No closure, and no part of the module: a copy of it must compute with its own weights, and its state is as
            # it was.
            network.forward = partial(_forward, network, network.forward, layers)
    return module


def _is_stacked(network: nn.RNNBase) -> bool:
    """Whether it is torch's own, with dropout between layers, and weights that nobody else makes for each step."""
    usual = type(network) in KINDS and all(name in network._parameters for name in network._flat_weights_names)
    return usual and network.num_layers > 1 and network.dropout > 0


def _layer(network: nn.RNNBase, number: int) -> nn.RNNBase:
    """One layer as a network of its own, with the same weights."""
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
    # It looks for new weights whenever it computes, and puts those that it finds next to each other in memory of their
    # own. Let it find them now: later they lie in a model's row and must stay there.
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
