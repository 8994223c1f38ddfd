"""Build the network of a run, and check it on two samples.

This happens before anything is written.
"""

import inspect
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import models
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset, PartitionedDataset, Samples
from fedloom.errors import FedloomError, InputError, first_line_of_error
from fedloom.models.base import copy_model
from fedloom.training.context import TrainingContext
from fedloom.utils.formatting import short_repr

NARROWEST = 8
"""Channels that oneDNN's AVX2 kernels read at once."""


def make_checked_model(
    name: str,
    user_model: nn.Module | Callable[[], nn.Module] | None,
    federated_data: FederatedDataset,
    rng_streams: RngStreams,
    *,
    share_frozen: bool,
) -> nn.Module:
    """Return the network `name`, or a copy of the user's own, which shares frozen weights with `share_frozen`."""
    if user_model is None:
        outputs = federated_data.classes or _targets(federated_data)
        if not outputs:
            raise InputError(
                f"{federated_data.name!r} has no classes, and its targets are not n x 1 or wider, so the network "
                f"{name!r} does not fit; pass your own nn.Module as the model."
            )
        try:
            with rng_streams.seed_global_rng("init"):
                return models.build_model(name, federated_data.shape, outputs, federated_data.vocabulary_size)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError(f"the model {name!r} for {outputs:,} outputs does not fit into memory.") from error
    model: object = user_model
    if callable(model) and not isinstance(model, nn.Module):
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            raise InputError(
                f"the model {getattr(model, '__name__', model)!r} cannot be called without arguments ({error}); pass "
                "an instance, or a function that returns one."
            ) from None
        except ValueError:  # a callable without a signature
            pass
        with rng_streams.seed_global_rng("init"):
            model = model()
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model must be a name, an nn.Module or a function that returns one, not {type(model).__name__}."
        )
    # A copy, because training binds a module's tensors to rows. Frozen weights never change, so they can be shared, but
    # not if they move to another device or are read from a file: that would change the user's own module.
    return copy_model(model, share_frozen=share_frozen)


def check_channels_last(model: nn.Module) -> str | None:
    """Return the name of a layer whose gradient may be wrong on a CPU in channels-last order, or None.

    oneDNN's AVX2 kernel writes out of bounds for a strided 1x1 convolution with fewer than 8 input channels. It causes
    a crash, wrong numbers, or no visible effect (https://github.com/uxlfoundation/oneDNN/issues/6035). Every CPU counts
    as affected, because a run may be resumed on another.
    """
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    taking_steps = ((name, layer) for name, layer in layers if layer.kernel_size == (1, 1) and layer.stride != (1, 1))
    narrow = (name for name, layer in taking_steps if layer.in_channels // layer.groups < NARROWEST)
    return next(narrow, None)


def _targets(federated_data: FederatedDataset) -> int:
    """Return how many numbers a regression predicts; 0 if the targets are not a matrix."""
    samples = _some_samples(federated_data)
    return samples.y.shape[1] if samples is not None and samples.y.ndim == 2 else 0


def check_forward_pass(context: TrainingContext) -> None:
    """Pass two samples through network and loss, to report errors before anything is written."""
    federated_data, numerics = context.data, context.numerics
    samples = _some_samples(federated_data)
    if samples is None and federated_data.is_remote:
        return  # the sites check it
    if samples is None:
        raise InputError(f"the data {federated_data.name!r} holds no samples at all.")
    model = context.model
    model.eval()
    if numerics.augment is not None:
        numerics.augment(samples.x, torch.Generator())  # raises an error if it cannot augment these samples
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            x = federated_data.transform(samples.x, channels_last=numerics.channels_last)
            output = model(x)
            if context.criterion is F.mse_loss and output.shape != samples.y.shape:
                raise InputError(
                    f"the model's output has shape {tuple(output.shape)}, but the targets have "
                    f"{tuple(samples.y.shape)}; the mean squared error needs equal shapes."
                )
            if isinstance(output, Tensor):  # as in training, to detect a loss that does not depend on the model
                output = output.detach().requires_grad_()
            with torch.enable_grad():
                loss: object = context.criterion(output * 1 if isinstance(output, Tensor) else output, samples.y)
    except FedloomError:
        raise
    except Exception as error:
        text = "its inputs are token ids, so it needs a network for text; store integers that are quantities as floats"
        hint = f"; {text}" if samples.are_tokens else ""
        raise InputError(
            f"the model cannot be trained on {federated_data.name!r}: {first_line_of_error(error)}{hint}."
        ) from error
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss must be a tensor with one number, not {short_repr(loss)}.")
    if isinstance(output, Tensor) and not loss.requires_grad:
        raise InputError("the loss does not depend on the model's output, so nothing can learn.")
    if loss.dim() != 0:
        raise InputError(f"the loss must be one number for a batch, not a tensor of shape {tuple(loss.shape)}.")
    if federated_data.classes and output.shape[-1] < federated_data.classes:
        raise InputError(
            f"the model has {output.shape[-1]} outputs, but {federated_data.name!r} has {federated_data.classes} "
            "classes."
        )


def _some_samples(federated_data: FederatedDataset) -> Samples | None:
    held = [federated_data.test] if federated_data.test is not None and len(federated_data.test) else []
    if isinstance(federated_data, PartitionedDataset) and len(federated_data.pool):
        held.append(federated_data.pool)
    if held and held[0].are_tokens:  # include the largest token: the embedding must be large enough
        largest = [samples.take(samples.x.flatten(1).amax(1).argmax(keepdim=True)) for samples in held]
        return Samples(torch.cat([s.x for s in largest]), torch.cat([s.y for s in largest]))
    if held:
        return held[0][:2]
    for client_id in federated_data.available_client_ids[:1000]:
        samples = federated_data.client_samples(client_id)
        if len(samples):
            return samples[:2]
    return None
