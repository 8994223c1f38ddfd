"""Build a run from its request: data, model, layout, method, engine and rounds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import data as datasets
from fedloom.config import Config
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset, Samples
from fedloom.data.cache import Progress
from fedloom.devices.precision import choose_cudnn_heuristic, prefers_channels_last, set_precision
from fedloom.devices.selection import select_device
from fedloom.engines.base import Engine, RemoteEngineFactory
from fedloom.engines.registry import choose_engine, create_engine
from fedloom.engines.sequential import SequentialEngine
from fedloom.errors import InputError
from fedloom.methods.base import Client, MethodContext, ServerResources, ignore_progress
from fedloom.methods.composition import ComposedMethod, composition_is_personalized
from fedloom.models.base import copy_model
from fedloom.models.initial_weights import InitialWeights, load_initial_weights, read_initial_weights
from fedloom.privacy import PrivacyMechanism, check_private_method
from fedloom.runs.check_model import check_channels_last, check_forward_pass, make_checked_model
from fedloom.runs.load_data import RunData, load_run_data
from fedloom.runs.pool_samples import PooledFederatedDataset
from fedloom.runs.resolve import RunRequest
from fedloom.runs.round import RoundRunner
from fedloom.training.context import (
    OPTIMIZER_PREFIX,
    PERSONAL_KEY,
    ClientProgram,
    Numerics,
    TrainingContext,
)
from fedloom.training.optimizers import make_optimizer


def build_run(
    request: RunRequest,
    download_progress: Progress | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
    server_progress: Callable[[str, int, int], None] = ignore_progress,
    remote_engine: RemoteEngineFactory | None = None,
) -> "BuiltRun":
    """Build a run that `resolve_run` returned.

    `initial_weights` are the weights that the run once read from `init`; they replace that file. `download_progress`
    reports downloads, and `server_progress` long work of the method on the server. `remote_engine` replaces the engine
    of this machine.
    """
    device, rng_streams = select_device(request.config.device), RngStreams(request.config.seed)
    engine_class = SequentialEngine if remote_engine is not None else choose_engine(request.config, device)

    data = load_run_data(request, rng_streams, download_progress)
    request = request.replace_settings(clients=data.num_clients)  # even if the data define it
    if remote_engine is not None:
        if data.held_out is not None:
            raise InputError("held_out_clients needs the samples of clients that never train, but sites keep theirs.")
        data = replace(data, federated_data=remote_engine.server_view(data.federated_data))
    model, weights = _build_run_model(request, data, rng_streams, device, initial_weights)
    # Rows travel in their memory format, so all sides need the same one: that of a CPU, which a site may have.
    ordering = device if remote_engine is None else torch.device("cpu")
    layout, numerics = _make_layout(request.config, model, data.federated_data, ordering)
    privacy = PrivacyMechanism.of(request.config, len(data.federated_data), rng_streams)
    server = _make_server_resources(request.config, data, layout, device, engine_class, server_progress)
    method_context = _make_method_context(request, data, model, layout, rng_streams, privacy, server)
    parts = request.method.build(method_context)
    if request.method.bracket is not None:
        privacy = None
    if privacy is not None:
        check_private_method(request.method, parts, layout)
        privacy.account.epsilon(request.config.rounds)  # raises now if it cannot be computed
    training_context = _make_training_context(request, method_context, model, data, numerics, parts.client)
    if remote_engine is not None:
        engine = remote_engine.create_engine(training_context)
    else:
        engine = create_engine(engine_class, training_context, request.config)
    pooled_bytes = engine.context.data.nbytes if isinstance(engine.context.data, PooledFederatedDataset) else None
    rounds = RoundRunner(
        request.config, method_context, parts, engine, data.federated_data.label_counts(), privacy, pooled_bytes
    )
    notes = [*data.notes, *_privacy_notes(request, method_context), *parts.notes()]
    return BuiltRun(request.config, request.method, data, model, engine, rounds, tuple(notes), weights)


def build_site_context(request: RunRequest) -> tuple[RunRequest, TrainingContext]:
    """Return the request with the number of clients, and what a site needs to train its clients.

    That is all but the server's parts, which may be large.
    """
    device, rng_streams = select_device(request.config.device), RngStreams(request.config.seed)
    data = load_run_data(request, rng_streams)
    request = request.replace_settings(clients=data.num_clients)
    model, _ = _build_run_model(request, data, rng_streams, device)
    layout, numerics = _make_layout(request.config, model, data.federated_data, torch.device("cpu"))
    privacy = PrivacyMechanism.of(request.config, len(data.federated_data), rng_streams)
    server = _make_server_resources(request.config, data, layout, device, SequentialEngine)
    method_context = _make_method_context(request, data, model, layout, rng_streams, privacy, server)
    client = request.method.build_client(method_context)
    return request, _make_training_context(request, method_context, model, data, numerics, client)


def _build_run_model(
    request: RunRequest,
    data: RunData,
    rng_streams: RngStreams,
    device: torch.device,
    initial_weights: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, InitialWeights | None]:
    """Build the network with its initial weights; also return how they were taken from the file `init`, if it is read.

    `initial_weights` replaces that file.
    """
    config = request.config
    share_frozen = device.type == "cpu" and not config.init
    model = make_checked_model(
        config.model, request.user_objects.model, data.federated_data, rng_streams, share_frozen=share_frozen
    )
    if initial_weights is not None:
        model.load_state_dict(initial_weights)
    elif config.init is not None:
        file = read_initial_weights(Path(config.init), config.init_sha256)
        return model, load_initial_weights(model, file, rng_streams, config.model, config.new_head, data.class_names)
    return model, None


def _make_layout(
    config: Config, model: nn.Module, federated_data: FederatedDataset, device: torch.device
) -> tuple[Layout, Numerics]:
    """Return the layout of the models, and how their networks compute."""
    channels_last = len(federated_data.shape) == 3 and _wants_channels_last(config, model, device)
    autocast = torch.bfloat16 if config.precision == "bf16" else None
    numerics = Numerics(channels_last, autocast, datasets.make_augment(config.augment))
    return Layout.of(model, channels_last=channels_last), numerics


def _wants_channels_last(config: Config, model: nn.Module, device: torch.device) -> bool:
    """Return whether to store images channels-last: as set in the config, by default if it is faster."""
    spoilt = check_channels_last(model) if device.type == "cpu" else None
    if config.channels_last is None:
        return spoilt is None if device.type == "cpu" else prefers_channels_last(model, config.precision)
    if config.channels_last and spoilt is not None:
        raise InputError(
            f"the gradient of the layer {spoilt!r} may be wrong in channels-last order on a CPU, because it is a "
            "strided 1x1 convolution with few input channels; leave out --channels-last."
        )
    return config.channels_last


def _make_server_resources(
    config: Config,
    data: RunData,
    layout: Layout,
    device: torch.device,
    engine_class: type[Engine],
    progress: Callable[[str, int, int], None] = ignore_progress,
) -> ServerResources:
    """Return what the method may use on the server. The engine class decides where models are stored."""
    split = data.server_data
    return ServerResources(
        device=device,
        make_bank=partial(engine_class.make_bank, dtype=layout.dtype, device=device),
        cache_dir=Path(config.cache_dir) if config.cache_dir is not None else None,
        keep_checkpoints=config.keep_checkpoints,
        data=None if split is None else Samples(split.samples.x.to(device), split.samples.y.to(device)),
        labels_fit=split is not None and split.classes == data.federated_data.classes,
        progress=progress,
    )


def _make_method_context(
    request: RunRequest,
    data: RunData,
    model: nn.Module,
    layout: Layout,
    rng_streams: RngStreams,
    privacy: PrivacyMechanism | None,
    server: ServerResources,
) -> MethodContext:
    """Return what the parts of the method may know about the run."""
    config, federated_data = request.config, data.federated_data
    criterion = request.user_objects.loss or (F.cross_entropy if federated_data.classes else F.mse_loss)
    if isinstance(criterion, nn.Module) and server.device.type != "cpu":
        criterion = deepcopy(criterion).cpu()  # the forward check runs there; the user's own module stays on its device
    return MethodContext(
        layout=layout,
        initial=layout.read(model, server.device),
        num_clients=len(federated_data),
        clients_per_round=config.cohort_size,
        planned_rounds=config.rounds if privacy is None else privacy.rounds_of(config),
        rng_streams=rng_streams,
        config=config,
        num_examples=federated_data.num_examples,
        criterion=criterion,
        make_model=lambda: copy_model(model, share_frozen=True),
        classes=federated_data.classes,
        shape=federated_data.shape,
        server=server,
        transform=federated_data.transform,
    )


def _privacy_notes(request: RunRequest, context: MethodContext) -> list[str]:
    config, notes = request.config, []
    if context.planned_rounds != config.rounds:
        notes.append(
            f"max_epsilon {config.max_epsilon:g} is enough for {context.planned_rounds} of {config.rounds} rounds."
        )
    if config.clip_update is not None and request.method.bracket is not None:
        notes.append(f"{request.method.name} trains without privacy: updates are not clipped and get no noise.")
    return notes


def _make_training_config(request: RunRequest, client: Client[Any]) -> Config:
    """Return the settings with which clients train."""
    config = request.config
    if request.method.bracket == "centralized":  # its pool has no validation samples
        stateful = bool(make_optimizer(config).state_shapes(0))
        return config.model_copy(update={"validation": 0.0, "keep_optimizer": stateful})
    return config.model_copy(update={"validation": config.validation or client.validation_fraction()})


def _make_client_program(request: RunRequest, config: Config, client: Client[Any], layout: Layout) -> ClientProgram:
    """Return what the engine needs of the method's client."""
    server_class = request.method.part_class("server")
    personal_columns, state_shapes = client.personal_columns(layout), client.state_shapes(layout)
    if config.keep_optimizer:
        shapes = make_optimizer(config).state_shapes(layout.trainable)
        state_shapes = {**state_shapes, **{f"{OPTIMIZER_PREFIX}{name}": shape for name, shape in shapes.items()}}
    if personal_columns:
        count = sum(columns.stop - columns.start for columns in personal_columns)
        state_shapes = {**state_shapes, PERSONAL_KEY: (count,)}
    return ClientProgram(
        train=client.train,
        personalize=client.personalize if composition_is_personalized(server_class, client, layout) else None,
        make_copy=lambda: _copy_client(client).train,
        upload_shapes=client.upload_shapes(layout),
        state_shapes=state_shapes,
        personal_columns=tuple(personal_columns),
        min_examples=client.min_examples(),
    )


def _copy_client(client: Client[Any]) -> Client[Any]:
    """Copy a client. The copy shares the context, its values and the options."""
    context = client.context
    common = (context, client.options, *vars(context).values(), *vars(context.server).values())
    try:
        return deepcopy(client, {id(thing): thing for thing in common})
    except Exception:  # it holds something that cannot be copied; a client should store nothing, and usually does not
        return client


def _make_training_context(
    request: RunRequest,
    method_context: MethodContext,
    model: nn.Module,
    data: RunData,
    numerics: Numerics,
    client: Client[Any],
) -> TrainingContext:
    """Return what the engine needs, checked with two samples; set the precision of this process."""
    config, layout = _make_training_config(request, client), method_context.layout
    federated_data = data.federated_data
    if request.method.bracket == "centralized":
        federated_data = PooledFederatedDataset(federated_data, request.config, method_context.rng_streams)
    context = TrainingContext(
        model=model,
        layout=layout,
        criterion=method_context.criterion,
        config=config,
        rng_streams=method_context.rng_streams,
        data=federated_data,
        client=_make_client_program(request, config, client, layout),
        numerics=numerics,
        held_out=data.held_out,
    )
    check_forward_pass(context)
    device = method_context.server.device
    if isinstance(context.criterion, nn.Module) and device.type != "cpu":
        context.criterion.to(device)  # a copy of the user's; the server uses it too
    set_precision(device, config.precision, not config.fast)
    choose_cudnn_heuristic(model, device, config.precision, not config.fast)
    return context


LAYOUT = "layout"
"""Key of the layout's fingerprint in a state."""


@dataclass
class BuiltRun:
    """Everything that a run needs. The caller must close the engine."""

    config: Config
    method: ComposedMethod
    data: RunData
    model: nn.Module
    engine: Engine
    rounds: RoundRunner
    notes: tuple[str, ...] = ()
    """What the user should know about the data and the settings."""
    initial_weights: InitialWeights | None = None
    """How the weights were taken from the file that `init` names; None if that file was not read."""

    @property
    def layout(self) -> Layout:
        """The layout of the models."""
        return self.engine.context.layout

    @contextmanager
    def engine_closed(self) -> Iterator["BuiltRun"]:
        """Yield this run, and close its engine at the end."""
        with self.engine:
            yield self

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts and the fingerprint of the layout."""
        return {
            LAYOUT: self.layout.fingerprint(),
            **{name: part.state_dict() for name, part in self.rounds.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Raise an InputError if its models have another layout."""
        if state.get(LAYOUT, self.layout.fingerprint()) != self.layout.fingerprint():
            raise InputError(
                "the checkpoint does not fit the network: the layers or the order of their weights differ. Resume with "
                "the versions of fedloom and of the model that the run started with."
            )
        for name, part in self.rounds.parts.items():
            part.load_state_dict(state[name])

    def report_values(self) -> dict[str, Any]:
        """Return what a report needs to know beside the settings."""
        values: dict[str, Any] = {}
        if self.method.use_server_data:
            values["server_data_used_by"] = list(self.method.use_server_data)
        if self.data.federated_data.test_owners is not None:
            values["client_test_samples"] = True
        if self.data.held_out is not None:
            values["held_out_client_ids"] = sorted(self.data.held_out.client_ids)
            values["new_client"] = self.method.new_client
        return values

    def count_test_labels(self) -> NDArray[np.int64] | None:
        """Return the number of test samples of each class; None for regressions and without test samples."""
        test, classes = self.data.federated_data.test, self.data.federated_data.classes
        if test is None or not len(test) or not classes:
            return None
        counts: NDArray[np.int64] = torch.bincount(test.y.cpu(), minlength=classes).numpy()
        return counts

    def global_state_dict(self) -> dict[str, Tensor]:
        """Return the global model as a state dict, with the frozen weights."""
        names = set(self.layout.frozen)  # cloned, because safetensors does not store tied weights, which share memory
        frozen = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items() if k in names}
        return self.layout.state_dict(self.rounds.global_model().cpu()) | frozen
