"""What server and clients have in common, before there are any parts of a method: data, network, layout, context."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import data as datasets
from fedloom.config import Config
from fedloom.data import Federation, Samples
from fedloom.data.download import Progress
from fedloom.devices import make_device
from fedloom.engines import Engine, Homes, PlainEngine, Shop
from fedloom.engines.base import Train
from fedloom.errors import InputError
from fedloom.fitting import copy_module, make_module, spoilt_by_channels_last, try_out
from fedloom.gathering import gather
from fedloom.initial import Beginning, begin_with, read_source
from fedloom.methods import Context
from fedloom.methods.base import Local, nobody
from fedloom.methods.catalogue import Composition, personalised
from fedloom.precision import choose_rule, set_precision, wants_channels_last
from fedloom.privacy import Privacy
from fedloom.request import Own, check, pin_partition, replace_config, with_server_data
from fedloom.rows import Layout
from fedloom.streams import Streams
from fedloom.workshop import OPTIMIZER, STAYS, Workshop


@dataclass
class Ground:
    """What server and clients have in common, before there are any parts of a method."""

    config: Config
    composition: Composition
    federation: Federation
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    module: nn.Module
    beginning: Beginning | None
    layout: Layout
    channels_last: bool
    context: Context
    privacy: Privacy | None

    def shop(self, local: Local[Any], personal: Train | None) -> Shop:
        """What an engine needs to train clients with this `local`."""
        config, layout, federation = self.config, self.layout, self.federation
        stays = local.stays_home(layout)
        homes = local.home(layout)
        if config.keep_optimizer:
            shapes = config.make_optimizer().remembers(layout.trainable)
            homes = {**homes, **{f"{OPTIMIZER}{name}": shape for name, shape in shapes.items()}}
        if stays:
            homes = {**homes, STAYS: (sum(columns.stop - columns.start for columns in stays),)}
        workshop = Workshop(
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
        try_out(workshop, federation)
        device, criterion = self.context.device, self.context.criterion
        if isinstance(criterion, nn.Module) and device.type != "cpu":
            criterion.to(device)  # a copy, and the server's too
        set_precision(device, config.precision, not config.fast)
        choose_rule(self.module, device, config.precision, not config.fast)

        kept = Homes(homes, layout.dtype)
        return Shop(workshop, federation, local.train, kept, personal, lambda: local_apart(local).train)


def local_apart(local: Local[Any]) -> Local[Any]:
    """The same with things of its own, but for what all parts have in common."""
    common = (local.context, local.options, *vars(local.context).values())
    try:
        return deepcopy(local, {id(thing): thing for thing in common})
    except Exception:  # it holds something of which there is only one; it should keep nothing, and usually does
        return local


def lay_ground(
    config: Config,
    own: Own | None,
    engine_class: type[Engine],
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    working: Callable[[str, int, int], None] = nobody,
    seen: Callable[[Federation], Federation] | None = None,
    *,
    over_sites: bool = False,
) -> Ground:
    """Gather the data and make the network. The class of the engine is needed here, for it says where models lie.

    `progress` follows downloads, and `working` long work of the method on the server. `start` is taken instead of what
    `init` names. `seen` makes of the clients' data what the server sees of them, where they are elsewhere. `over_sites`
    says that models travel between the server and sites, whose devices may differ.
    """
    own = own or Own()
    composition = check(config)
    config = with_server_data(pin_partition(config), own, [composition])
    streams = Streams(config.seed)
    device = make_device(config.device)
    gathered = gather(config, own, composition, streams, progress)
    federation, held, notes = gathered.federation, gathered.held, gathered.notes
    if config.clients is None:
        config = replace_config(config, clients=len(federation))
    elif len(federation) != config.clients:
        raise InputError(f"clients is {config.clients}, but the data has {len(federation)} of them.")
    if seen is not None:
        federation = seen(federation)
    module = make_module(config.model, own.model, federation, streams, shared=device.type == "cpu" and not config.init)
    beginning = None
    if start is not None:
        module.load_state_dict(start)
    elif config.init is not None:
        source = read_source(Path(config.init), config.init_sha256)
        beginning = begin_with(module, source, streams, config.model, config.new_head, gathered.class_names)
    # Models travel as they lie, so all sides need one order: that of a CPU, which somebody may have.
    ordering = torch.device("cpu") if over_sites else device
    channels_last = len(federation.shape) == 3 and _wants_channels_last(config, module, ordering)
    layout = Layout.of(module, channels_last=channels_last)
    privacy = Privacy.of(config, len(federation), streams)
    rounds = config.rounds if privacy is None else privacy.rounds_of(config)
    if rounds < config.rounds:
        notes = (*notes, f"max_epsilon {config.max_epsilon:g} is enough for {rounds} of {config.rounds} rounds.")
    criterion = own.loss or (F.cross_entropy if federation.classes else F.mse_loss)
    if isinstance(criterion, nn.Module) and device.type != "cpu":
        criterion = deepcopy(criterion).cpu()  # where it is tried out first; the user's own stays where it is
    context = Context(
        layout=layout,
        initial=layout.read(module, device),
        clients=len(federation),
        per_round=config.cohort,
        rounds=rounds,
        streams=streams,
        training=config,
        samples=federation.samples,
        criterion=criterion,
        make_module=lambda: copy_module(module, share_frozen=True),
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
    return Ground(
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


def build_shop(config: Config, own: Own | None = None) -> tuple[Config, Shop]:
    """What a site needs to train its clients: everything but the server's parts, which may be large."""
    ground = lay_ground(config, own, PlainEngine, over_sites=True)
    local = ground.composition.build_local(ground.context)
    server = ground.composition.part_class("server")
    personal = local.personal if personalised(server, local, ground.layout) else None
    return ground.config, ground.shop(local, personal)


def _wants_channels_last(config: Config, module: nn.Module, device: torch.device) -> bool:
    """Whether images are kept in that order: where it is faster, unless somebody has said it."""
    spoilt = spoilt_by_channels_last(module) if device.type == "cpu" else None
    if config.channels_last is None:
        return spoilt is None if device.type == "cpu" else wants_channels_last(module, config.precision)
    if config.channels_last and spoilt is not None:
        raise InputError(
            f"the gradient of the layer {spoilt!r} may be wrong in channels-last order on a CPU, for it takes steps "
            "and has few input channels; leave --channels-last out."
        )
    return config.channels_last
