"""Build a run from its config: data, model, layout, method and engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import data as datasets
from fedloom.config import Config, replace_config
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
from fedloom.methods import MethodContext
from fedloom.methods.base import Client, ignore_progress
from fedloom.methods.composition import ComposedMethod, composition_is_personalized
from fedloom.models.base import copy_model
from fedloom.models.initial_weights import InitialWeights, load_initial_weights, read_initial_weights
from fedloom.privacy import PrivacyMechanism, check_private_method
from fedloom.runs.check_model import check_channels_last, check_forward_pass, make_checked_model
from fedloom.runs.load_data import load_run_data
from fedloom.runs.resolve import UserObjects, record_partition_hash, resolve_method, resolve_server_data
from fedloom.runs.round import RoundRunner
from fedloom.training.context import OPTIMIZER_PREFIX, PERSONAL_KEY, TrainingContext
from fedloom.training.local_training import ClientStates, EngineContext, Train
from fedloom.training.optimizers import make_optimizer


@dataclass
class _RunSetup:
    """What the server and the clients share, built before the parts of the method."""

    config: Config
    method: ComposedMethod
    federated_data: FederatedDataset
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    model: nn.Module
    initial_weights: InitialWeights | None
    layout: Layout
    channels_last: bool
    context: MethodContext
    privacy: PrivacyMechanism | None

    def engine_context(self, client: Client[Any], personalize: Train | None) -> EngineContext:
        """Return what an engine needs to train clients with `client`."""
        config, layout, federated_data = self.config, self.layout, self.federated_data
        personal_columns = client.personal_columns(layout)
        state_shapes = client.state_shapes(layout)
        if config.keep_optimizer:
            shapes = make_optimizer(config).state_shapes(layout.trainable)
            state_shapes = {**state_shapes, **{f"{OPTIMIZER_PREFIX}{name}": shape for name, shape in shapes.items()}}
        if personal_columns:
            state_shapes = {
                **state_shapes,
                PERSONAL_KEY: (sum(columns.stop - columns.start for columns in personal_columns),),
            }
        training_context = TrainingContext(
            model=self.model,
            layout=layout,
            criterion=self.context.criterion,
            transform=federated_data.transform,
            config=config.model_copy(update={"validation": config.validation or client.validation_fraction()}),
            rng_streams=self.context.rng_streams,
            classes=federated_data.classes,
            channels_last=self.channels_last,
            augment=datasets.make_augment(config.augment),
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            upload_shapes=client.upload_shapes(layout),
            min_examples=client.min_examples(),
            state_shapes=state_shapes,
            personal_columns=tuple(personal_columns),
        )
        check_forward_pass(training_context, federated_data)
        device, criterion = self.context.device, self.context.criterion
        if isinstance(criterion, nn.Module) and device.type != "cpu":
            criterion.to(device)  # a copy of the user's; the server uses it too
        set_precision(device, config.precision, not config.fast)
        choose_cudnn_heuristic(self.model, device, config.precision, not config.fast)

        client_states = ClientStates(state_shapes, layout.dtype)
        return EngineContext(
            training_context,
            federated_data,
            client.train,
            client_states,
            personalize,
            lambda: _copy_client(client).train,
        )


def _copy_client(client: Client[Any]) -> Client[Any]:
    """Copy a client. The copy shares the context, its values and the options."""
    common = (client.context, client.options, *vars(client.context).values())
    try:
        return deepcopy(client, {id(thing): thing for thing in common})
    except Exception:  # it holds something that cannot be copied; a client should store nothing, and usually does not
        return client


def _prepare_run(
    config: Config,
    user_objects: UserObjects | None,
    engine_class: type[Engine],
    download_progress: Progress | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
    server_progress: Callable[[str, int, int], None] = ignore_progress,
    server_view: Callable[[FederatedDataset], FederatedDataset] | None = None,
    *,
    over_sites: bool = False,
) -> _RunSetup:
    """Load the data and build the network. The engine class decides where models are stored.

    `download_progress` reports downloads, and `server_progress` long work of the method on the server.
    `initial_weights` replaces the file that `init` names. If the clients are elsewhere, `server_view` returns what the
    server may see of their data. With `over_sites`, models travel between the server and sites with other devices.
    """
    user_objects = user_objects or UserObjects()
    composed_method = resolve_method(config)
    config = resolve_server_data(record_partition_hash(config), user_objects, [composed_method])
    rng_streams = RngStreams(config.seed)
    device = select_device(config.device)
    run_data = load_run_data(config, user_objects, composed_method, rng_streams, download_progress)
    federated_data, server_data, notes = run_data.federated_data, run_data.server_data, run_data.notes
    if config.clients is None:
        config = replace_config(config, clients=len(federated_data))
    elif len(federated_data) != config.clients:
        raise InputError(f"clients is {config.clients}, but the data has {len(federated_data)} of them.")
    if server_view is not None:
        federated_data = server_view(federated_data)
    model = make_checked_model(
        config.model,
        user_objects.model,
        federated_data,
        rng_streams,
        share_frozen=device.type == "cpu" and not config.init,
    )
    loaded_weights = None
    if initial_weights is not None:
        model.load_state_dict(initial_weights)
    elif config.init is not None:
        weights_file = read_initial_weights(Path(config.init), config.init_sha256)
        loaded_weights = load_initial_weights(
            model, weights_file, rng_streams, config.model, config.new_head, run_data.class_names
        )
    # Rows travel in their memory format, so all sides need the same one: that of a CPU, which a site may have.
    ordering = torch.device("cpu") if over_sites else device
    channels_last = len(federated_data.shape) == 3 and _wants_channels_last(config, model, ordering)
    layout = Layout.of(model, channels_last=channels_last)
    privacy = PrivacyMechanism.of(config, len(federated_data), rng_streams)
    rounds = config.rounds if privacy is None else privacy.rounds_of(config)
    if rounds < config.rounds:
        notes = (*notes, f"max_epsilon {config.max_epsilon:g} is enough for {rounds} of {config.rounds} rounds.")
    criterion = user_objects.loss or (F.cross_entropy if federated_data.classes else F.mse_loss)
    if isinstance(criterion, nn.Module) and device.type != "cpu":
        criterion = deepcopy(criterion).cpu()  # the forward check runs there; the user's own module stays on its device
    context = MethodContext(
        layout=layout,
        initial=layout.read(model, device),
        num_clients=len(federated_data),
        clients_per_round=config.cohort_size,
        rounds=rounds,
        rng_streams=rng_streams,
        config=config,
        num_examples=federated_data.num_examples,
        criterion=criterion,
        make_model=lambda: copy_model(model, share_frozen=True),
        classes=federated_data.classes,
        shape=federated_data.shape,
        cache_dir=Path(config.cache_dir) if config.cache_dir is not None else None,
        keep_checkpoints=config.keep_checkpoints,
        device=device,
        make_bank=partial(engine_class.make_bank, dtype=layout.dtype, device=device),
        progress=server_progress,
        server_data=None
        if server_data is None
        else Samples(server_data.samples.x.to(device), server_data.samples.y.to(device)),
        server_labels=server_data is not None and server_data.classes == federated_data.classes,
        transform=federated_data.transform,
    )
    return _RunSetup(
        config=config,
        method=composed_method,
        federated_data=federated_data,
        class_names=run_data.class_names,
        notes=notes,
        model=model,
        initial_weights=loaded_weights,
        layout=layout,
        channels_last=channels_last,
        context=context,
        privacy=privacy,
    )


def build_run_for_site(config: Config, user_objects: UserObjects | None = None) -> tuple[Config, EngineContext]:
    """Return what a site needs to train its clients: all but the server's parts, which may be large."""
    setup = _prepare_run(config, user_objects, SequentialEngine, over_sites=True)
    client = setup.method.build_client(setup.context)
    server_class = setup.method.part_class("server")
    personalize = client.personalize if composition_is_personalized(server_class, client, setup.layout) else None
    return setup.config, setup.engine_context(client, personalize)


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


LAYOUT = "layout"
"""Key of the layout's fingerprint in a state."""


@dataclass
class BuiltRun:
    """Everything that a run needs. The caller must close the engine."""

    config: Config
    method: ComposedMethod
    federated_data: FederatedDataset
    class_names: tuple[str, ...]
    model: nn.Module
    layout: Layout
    engine: Engine
    rounds: RoundRunner
    notes: tuple[str, ...] = ()
    """What the user should know about the data and the settings."""
    initial_weights: InitialWeights | None = None
    """How the weights were taken from the file that `init` names; None if that file was not read."""

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

    def count_test_labels(self) -> NDArray[np.int64] | None:
        """Return the number of test samples of each class; None for regressions and without test samples."""
        test, classes = self.federated_data.test, self.federated_data.classes
        if test is None or not len(test) or not classes:
            return None
        counts: NDArray[np.int64] = torch.bincount(test.y.cpu(), minlength=classes).numpy()
        return counts

    def artifacts(self) -> dict[str, dict[str, Tensor]]:
        """Return the artifacts of all parts, with the normalization constants, because images are made as inputs."""
        transform, artifacts = self.federated_data.transform, {}
        constants = {"mean": torch.tensor(transform.mean), "std": torch.tensor(transform.std)} if transform.mean else {}
        for _, part in self.rounds.parts.items():
            artifacts.update({name: {**tensors, **constants} for name, tensors in part.artifacts().items()})
        return artifacts

    def global_state_dict(self) -> dict[str, Tensor]:
        """Return the global model as a state dict, with the frozen weights."""
        names = set(self.layout.frozen)  # cloned, because safetensors does not store tied weights, which share memory
        frozen = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items() if k in names}
        return self.layout.state_dict(self.rounds.global_model().cpu()) | frozen


def build_run(
    config: Config,
    user_objects: UserObjects | None = None,
    download_progress: Progress | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
    server_progress: Callable[[str, int, int], None] = ignore_progress,
    remote_engine: RemoteEngineFactory | None = None,
) -> BuiltRun:
    """Build a run.

    `initial_weights` are the weights that the run once read from `init`; they replace that file. `download_progress`
    reports downloads, and `server_progress` long work of the method on the server. `remote_engine` replaces the engine
    of this machine.
    """
    device = select_device(config.device)
    engine_class = SequentialEngine if remote_engine is not None else choose_engine(config, device)
    server_view = remote_engine.server_view if remote_engine is not None else None
    setup = _prepare_run(
        config,
        user_objects,
        engine_class,
        download_progress,
        initial_weights,
        server_progress,
        server_view,
        over_sites=remote_engine is not None,
    )
    config = setup.config
    parts = setup.method.build(setup.context)
    if setup.privacy is not None:
        check_private_method(setup.method, parts, setup.layout)
        setup.privacy.account.epsilon(config.rounds)  # raises now if it cannot be computed
    personalize = parts.client.personalize if parts.is_personalized(setup.layout) else None
    engine_context = setup.engine_context(parts.client, personalize)
    engine = (
        remote_engine.create_engine(engine_context)
        if remote_engine is not None
        else create_engine(engine_class, engine_context, config)
    )
    rounds = RoundRunner(config, setup.context, parts, engine, setup.federated_data.label_counts(), setup.privacy)
    return BuiltRun(
        config,
        setup.method,
        setup.federated_data,
        setup.class_names,
        setup.model,
        setup.layout,
        engine,
        rounds,
        (*setup.notes, *(note for _, part in parts.items() for note in part.notes())),
        setup.initial_weights,
    )
