"""What server and clients have in common, before there are any parts of a method: data, network, layout, context.

From a config to something that runs: data, network, method and engine put together.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
from fedloom.methods.composition import ComposedMethod, is_personalized
from fedloom.models.initial_weights import InitialWeights, load_initial_weights, read_initial_weights
from fedloom.privacy import PrivacyMechanism, check_private_method
from fedloom.runs.check_model import check_channels_last, check_forward_pass, copy_model, make_checked_model
from fedloom.runs.load_data import load_run_data
from fedloom.runs.resolve import UserObjects, add_server_data, record_partition_hash, resolve_method
from fedloom.runs.round import RoundRunner
from fedloom.training.context import OPTIMIZER_PREFIX, PERSONAL_KEY, TrainingContext
from fedloom.training.local_training import ClientStates, EngineContext, Train
from fedloom.training.optimizers import make_optimizer


@dataclass
class _RunSetup:
    """What server and clients have in common, before there are any parts of a method."""

    config: Config
    composition: ComposedMethod
    federation: FederatedDataset
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    module: nn.Module
    beginning: InitialWeights | None
    layout: Layout
    channels_last: bool
    context: MethodContext
    privacy: PrivacyMechanism | None

    def shop(self, local: Client[Any], personal: Train | None) -> EngineContext:
        """What an engine needs to train clients with this `local`."""
        config, layout, federation = self.config, self.layout, self.federation
        stays = local.stays_home(layout)
        homes = local.home(layout)
        if config.keep_optimizer:
            shapes = make_optimizer(config).remembers(layout.trainable)
            homes = {**homes, **{f"{OPTIMIZER_PREFIX}{name}": shape for name, shape in shapes.items()}}
        if stays:
            homes = {**homes, PERSONAL_KEY: (sum(columns.stop - columns.start for columns in stays),)}
        workshop = TrainingContext(
            module=self.module,
            layout=layout,
            criterion=self.context.criterion,
            prepare=federation.prepare,
            training=config.model_copy(update={"validation": config.validation or local.holds_out()}),
            streams=self.context.streams,
            classes=federation.classes,
            channels_last=self.channels_last,
            augment=datasets.make_augment(config.augment),
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            uploads=local.uploads(layout),
            fewest=local.fewest_samples(),
            home=homes,
            stays_home=tuple(stays),
        )
        check_forward_pass(workshop, federation)
        device, criterion = self.context.device, self.context.criterion
        if isinstance(criterion, nn.Module) and device.type != "cpu":
            criterion.to(device)  # a copy, and the server's too
        set_precision(device, config.precision, not config.fast)
        choose_cudnn_heuristic(self.module, device, config.precision, not config.fast)

        kept = ClientStates(homes, layout.dtype)
        return EngineContext(workshop, federation, local.train, kept, personal, lambda: _copy_client(local).train)


def _copy_client(local: Client[Any]) -> Client[Any]:
    """The same with things of its own, but for what all parts have in common."""
    common = (local.context, local.options, *vars(local.context).values())
    try:
        return deepcopy(local, {id(thing): thing for thing in common})
    except Exception:  # it holds something of which there is only one; it should keep nothing, and usually does
        return local


def _prepare_run(
    config: Config,
    own: UserObjects | None,
    engine_class: type[Engine],
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    working: Callable[[str, int, int], None] = ignore_progress,
    seen: Callable[[FederatedDataset], FederatedDataset] | None = None,
    *,
    over_sites: bool = False,
) -> _RunSetup:
    """Gather the data and make the network. The class of the engine is needed here, for it says where models lie.

    `progress` follows downloads, and `working` long work of the method on the server. `start` is taken instead of what
    `init` names. `seen` makes of the clients' data what the server sees of them, where they are elsewhere. `over_sites`
    says that models travel between the server and sites, whose devices may differ.
    """
    own = own or UserObjects()
    composition = resolve_method(config)
    config = add_server_data(record_partition_hash(config), own, [composition])
    streams = RngStreams(config.seed)
    device = select_device(config.device)
    gathered = load_run_data(config, own, composition, streams, progress)
    federation, held, notes = gathered.federation, gathered.held, gathered.notes
    if config.clients is None:
        config = replace_config(config, clients=len(federation))
    elif len(federation) != config.clients:
        raise InputError(f"clients is {config.clients}, but the data has {len(federation)} of them.")
    if seen is not None:
        federation = seen(federation)
    module = make_checked_model(
        config.model, own.model, federation, streams, shared=device.type == "cpu" and not config.init
    )
    beginning = None
    if start is not None:
        module.load_state_dict(start)
    elif config.init is not None:
        source = read_initial_weights(Path(config.init), config.init_sha256)
        beginning = load_initial_weights(module, source, streams, config.model, config.new_head, gathered.class_names)
    # Models travel as they lie, so all sides need one order: that of a CPU, which somebody may have.
    ordering = torch.device("cpu") if over_sites else device
    channels_last = len(federation.shape) == 3 and _wants_channels_last(config, module, ordering)
    layout = Layout.of(module, channels_last=channels_last)
    privacy = PrivacyMechanism.of(config, len(federation), streams)
    rounds = config.rounds if privacy is None else privacy.rounds_of(config)
    if rounds < config.rounds:
        notes = (*notes, f"max_epsilon {config.max_epsilon:g} is enough for {rounds} of {config.rounds} rounds.")
    criterion = own.loss or (F.cross_entropy if federation.classes else F.mse_loss)
    if isinstance(criterion, nn.Module) and device.type != "cpu":
        criterion = deepcopy(criterion).cpu()  # where it is tried out first; the user's own stays where it is
    context = MethodContext(
        layout=layout,
        initial=layout.read(module, device),
        clients=len(federation),
        per_round=config.cohort,
        rounds=rounds,
        streams=streams,
        training=config,
        samples=federation.samples,
        criterion=criterion,
        make_module=lambda: copy_model(module, share_frozen=True),
        classes=federation.classes,
        shape=federation.shape,
        cache_dir=Path(config.cache_dir) if config.cache_dir is not None else None,
        keep_checkpoints=config.keep_checkpoints,
        device=device,
        make_bank=partial(engine_class.make_bank, dtype=layout.dtype, device=device),
        progress=working,
        server_data=None if held is None else Samples(held.samples.x.to(device), held.samples.y.to(device)),
        server_labels=held is not None and held.classes == federation.classes,
        prepare=federation.prepare,
    )
    return _RunSetup(
        config=config,
        composition=composition,
        federation=federation,
        class_names=gathered.class_names,
        notes=notes,
        module=module,
        beginning=beginning,
        layout=layout,
        channels_last=channels_last,
        context=context,
        privacy=privacy,
    )


def build_run_for_site(config: Config, own: UserObjects | None = None) -> tuple[Config, EngineContext]:
    """What a site needs to train its clients: everything but the server's parts, which may be large."""
    ground = _prepare_run(config, own, SequentialEngine, over_sites=True)
    local = ground.composition.build_local(ground.context)
    server = ground.composition.part_class("server")
    personal = local.personal if is_personalized(server, local, ground.layout) else None
    return ground.config, ground.shop(local, personal)


def _wants_channels_last(config: Config, module: nn.Module, device: torch.device) -> bool:
    """Whether images are kept in that order: where it is faster, unless somebody has said it."""
    spoilt = check_channels_last(module) if device.type == "cpu" else None
    if config.channels_last is None:
        return spoilt is None if device.type == "cpu" else prefers_channels_last(module, config.precision)
    if config.channels_last and spoilt is not None:
        raise InputError(
            f"the gradient of the layer {spoilt!r} may be wrong in channels-last order on a CPU, for it takes steps "
            "and has few input channels; leave --channels-last out."
        )
    return config.channels_last


LAYOUT = "layout"
"""Where a state says what its models look like."""


@dataclass
class BuiltRun:
    """Everything a run needs. The engine must be closed."""

    config: Config
    composition: ComposedMethod
    federation: FederatedDataset
    class_names: tuple[str, ...]
    module: nn.Module
    layout: Layout
    engine: Engine
    rounds: RoundRunner
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    beginning: InitialWeights | None = None
    """How the start was taken from the file that `init` names; None where it was not."""

    @contextmanager
    def engine_closed(self) -> Iterator["BuiltRun"]:
        """This experiment, with its engine closed at the end."""
        with self.engine:
            yield self

    def state(self) -> dict[str, Any]:
        """The state of all parts, and what their models look like."""
        return {LAYOUT: self.layout.fingerprint(), **{name: part.state() for name, part in self.rounds.parts.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a saved state; models of another network, or that lie in another order, are refused."""
        if state.get(LAYOUT, self.layout.fingerprint()) != self.layout.fingerprint():
            raise InputError(
                "the run's checkpoint holds models of another network, or ones whose weights lie in another order, "
                "than the network that was built now; go on with the versions of fedloom and of the model that it "
                "began with."
            )
        for name, part in self.rounds.parts.items():
            part.load(state[name])

    def exhibits(self) -> dict[str, dict[str, Tensor]]:
        """What the parts have made to be looked at, and how inputs are normalised, for images are made as inputs."""
        prepare, found = self.federation.prepare, {}
        constants = {"mean": torch.tensor(prepare.mean), "std": torch.tensor(prepare.std)} if prepare.mean else {}
        for _, part in self.rounds.parts.items():
            found.update({name: {**tensors, **constants} for name, tensors in part.exhibits().items()})
        return found

    def deployed(self) -> dict[str, Tensor]:
        """The model that would be deployed now, as a state dict with frozen weights and all."""
        names = set(self.layout.frozen)  # copied, for tied ones share memory, which safetensors does not store
        frozen = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items() if k in names}
        return self.layout.state_dict(self.rounds.deployed().cpu()) | frozen


def build_run(
    config: Config,
    own: UserObjects | None = None,
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    working: Callable[[str, int, int], None] = ignore_progress,
    sites: RemoteEngineFactory | None = None,
) -> BuiltRun:
    """Put a run together. `start` is the start that the run once took from `init`, instead of reading it again.

    `progress` follows downloads, and `working` long work of the method on the server. `sites` take the place of an
    engine on this machine.
    """
    device = select_device(config.device)
    chosen = SequentialEngine if sites is not None else choose_engine(config, device)
    seen = sites.seen if sites is not None else None
    ground = _prepare_run(config, own, chosen, progress, start, working, seen, over_sites=sites is not None)
    config = ground.config
    parts = ground.composition.build(ground.context)
    if ground.privacy is not None:
        check_private_method(ground.composition, parts, ground.layout)
        ground.privacy.account.epsilon(config.rounds)  # says now if it cannot be kept
    personal = parts.local.personal if parts.personalised(ground.layout) else None
    shop = ground.shop(parts.local, personal)
    engine = sites.engine(shop) if sites is not None else create_engine(chosen, shop, config)
    rounds = RoundRunner(config, ground.context, parts, engine, ground.federation.label_counts(), ground.privacy)
    return BuiltRun(
        config,
        ground.composition,
        ground.federation,
        ground.class_names,
        ground.module,
        ground.layout,
        engine,
        rounds,
        (*ground.notes, *(note for _, part in parts.items() for note in part.notes())),
        ground.beginning,
    )
