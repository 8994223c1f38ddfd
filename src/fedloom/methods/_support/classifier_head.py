"""The head of a network (its last linear layer) and its inputs.

Methods that work on representations use them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fedloom.errors import InputError


def find_classifier_head(module: nn.Module, method_name: str) -> tuple[str, nn.Linear]:
    """Return the linear layer called `head`, or else the last one, and its name. Its input is the representation."""
    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise InputError(f"{method_name} needs a network that ends in a linear layer, and this one has none.")
    return next((pair for pair in linear if pair[0].rpartition(".")[2] == "head"), linear[-1])


@contextmanager
def capture_head_inputs(head: nn.Linear) -> Iterator[list[Tensor]]:
    """Collect the inputs of the head, one per forward pass inside the context."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
