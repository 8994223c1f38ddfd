"""The network for some data: made to fit them, and tried out on two samples before anything is written."""

import warnings
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import models
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset, PartitionedDataset, Samples
from fedloom.errors import FedloomError, InputError
from fedloom.training.context import TrainingContext
from fedloom.utils.formatting import short_repr

NARROWEST = 8
"""Channels that oneDNN's kernels for AVX2 take at once."""


def make_checked_model(
    name: str,
    own: nn.Module | Callable[[], nn.Module] | None,
    federation: FederatedDataset,
    streams: RngStreams,
    *,
    shared: bool,
) -> nn.Module:
    """The network `name`, or the user's own; `shared` leaves the frozen weights of a user's module where they are."""
    if own is None:
        outputs = federation.classes or _targets(federation)
        if not outputs:
            raise InputError(
                f"{federation.name!r} has no classes and no rows of targets, n x 1 or wider, so the network {name!r} "
                "does not fit; give a module of your own as the model."
            )
        try:
            with streams.globally("init"):
                return models.build_model(name, federation.shape, outputs, federation.tokens)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError(f"the model {name!r} for {outputs:,} outputs does not fit into memory.") from error
    module: object = own
    if callable(module) and not isinstance(module, nn.Module):
        with streams.globally("init"):
            module = module()
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a name, an nn.Module or what makes one, not {type(module).__name__}.")
    # A copy, because training binds a module's tensors to rows. Frozen weights stay shared, they never change; on
    # another device, or where a file is read into them, they must not be, or the user's own would change.
    return copy_model(module, share_frozen=shared)


def check_channels_last(module: nn.Module) -> str | None:
    """The name of a layer whose gradient may be wrong on a CPU in channels-last order; None: there is none.

    oneDNN's kernel for AVX2 writes beyond its room where a 1 x 1 convolution takes steps and has fewer than 8 input
    channels: a crash, wrong numbers, or nothing to be seen (https://github.com/uxlfoundation/oneDNN/issues/6035). It is
    not asked which CPU this is, for a run may go on with another.
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d))
    taking_steps = ((name, layer) for name, layer in layers if layer.kernel_size == (1, 1) and layer.stride != (1, 1))
    narrow = (name for name, layer in taking_steps if layer.in_channels // layer.groups < NARROWEST)
    return next(narrow, None)


def copy_model(module: nn.Module, *, share_frozen: bool) -> nn.Module:
    """A copy of a module, with frozen weights of its own or the module's."""
    frozen = [p for p in module.parameters() if not p.requires_grad] if share_frozen else []
    return deepcopy(module, {id(p): p for p in frozen})


def _targets(federation: FederatedDataset) -> int:
    """How many numbers a regression is to tell; 0 where the targets are no rows of numbers."""
    samples = _some_samples(federation)
    return samples.y.shape[1] if samples is not None and samples.y.ndim == 2 else 0


def check_forward_pass(workshop: TrainingContext, federation: FederatedDataset) -> None:
    """Pass two samples through the network now, so that a misfit is said before anything is written."""
    samples = _some_samples(federation)
    if samples is None and federation.blind:
        return  # the sites will find out
    if samples is None:
        raise InputError(f"the data {federation.name!r} holds no samples at all.")
    module = workshop.module
    module.eval()
    if workshop.augment is not None:
        workshop.augment(samples.x, torch.Generator())  # says itself what it cannot work on
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            x = workshop.prepare(samples.x, channels_last=workshop.channels_last)
            output = module(x)
            if workshop.criterion is F.mse_loss and output.shape != samples.y.shape:
                raise InputError(
                    f"the model's output has shape {tuple(output.shape)} where the targets have "
                    f"{tuple(samples.y.shape)}; for the mean squared error they must be alike."
                )
            if isinstance(output, Tensor):  # as in training, so that a loss cut off from the model is found
                output = output.detach().requires_grad_()
            with torch.enable_grad():
                loss: object = workshop.criterion(output * 1 if isinstance(output, Tensor) else output, samples.y)
    except FedloomError:
        raise
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; its inputs are whole numbers, tokens, so it wants a network for text" if samples.are_tokens else ""
        raise InputError(f"the model cannot be trained on {federation.name!r}: {first.rstrip('.')}{hint}.") from error
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss must be a tensor with one number, not {short_repr(loss)}.")
    if isinstance(output, Tensor) and not loss.requires_grad:
        raise InputError("the loss does not depend on the model's output, so nothing can learn.")
    if loss.dim() != 0:
        raise InputError(f"the loss must be one number for a batch, not a tensor of shape {tuple(loss.shape)}.")
    if federation.classes and output.shape[-1] < federation.classes:
        raise InputError(
            f"the model has {output.shape[-1]} outputs, but {federation.name!r} has {federation.classes} classes."
        )


def _some_samples(federation: FederatedDataset) -> Samples | None:
    held = [federation.test] if federation.test is not None and len(federation.test) else []
    if isinstance(federation, PartitionedDataset) and len(federation.pool):
        held.append(federation.pool)
    if held and held[0].are_tokens:  # and the largest token, which no network may be too small for
        largest = [samples.take(samples.x.flatten(1).amax(1).argmax(keepdim=True)) for samples in held]
        return Samples(torch.cat([s.x for s in largest]), torch.cat([s.y for s in largest]))
    if held:
        return held[0][:2]
    for client in federation.here[:1000]:
        samples = federation.client(client)
        if len(samples):
            return samples[:2]
    return None
