"""From a config to something that runs: data, network, method and engine put together."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import data as datasets
from fedloom import models
from fedloom.config import Config, make_config
from fedloom.data import Federation, PooledFederation, Samples
from fedloom.data import server as on_server
from fedloom.data.server import ServerData
from fedloom.engines import CudaEngine, Engine, Homes, HostEngine, PlainEngine, Shop
from fedloom.engines.base import Train
from fedloom.engines.host import available as can_fork
from fedloom.errors import FedloomError, InputError
from fedloom.initial import Beginning, begin_with, read_source
from fedloom.methods import Context, compose, import_file
from fedloom.methods.base import Local, nobody
from fedloom.methods.catalogue import Composition, personalised
from fedloom.precision import set_precision
from fedloom.privacy import Privacy, compose_private, refuse_unfit
from fedloom.rounds import Rounds
from fedloom.rows import Layout
from fedloom.streams import Streams
from fedloom.workshop import STAYS, Criterion, Workshop

Progress = Callable[[str, int, int], None]
"""Called with (name, bytes so far, bytes in all) while a data set is downloaded."""


@dataclass(frozen=True)
class Own:
    """What a user brings as Python objects instead of names."""

    data: Federation | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None
    loss: Criterion | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("data", "model", "loss") if getattr(self, name) is not None)


class Sites(Protocol):
    """Clients elsewhere, in place of an engine on this machine."""

    def seen(self, federation: Federation) -> Federation:
        """What the server sees of the clients' data."""
        ...

    def engine(self, shop: Shop) -> Engine:
        """What asks the sites."""
        ...


@dataclass
class Experiment:
    """Everything a run needs. The engine must be closed."""

    config: Config
    composition: Composition
    federation: Federation
    class_names: tuple[str, ...]
    module: nn.Module
    layout: Layout
    engine: Engine
    rounds: Rounds
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    beginning: Beginning | None = None
    """How the start was taken from the file that `init` names; None where it was not."""

    @contextmanager
    def engine_closed(self) -> Iterator["Experiment"]:
        """This experiment, with its engine closed at the end."""
        with self.engine:
            yield self

    def state(self) -> dict[str, Any]:
        """The state of all parts."""
        return {name: part.state() for name, part in self.rounds.parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a saved state."""
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


def check(config: Config) -> Composition:
    """Find out whether a config names things that exist, before anything is written."""
    for path in config.imports:
        import_file(path)
    return (compose if config.clip_update is None else compose_private)(config.method, config.options)


def build(
    config: Config,
    own: Own | None = None,
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    working: Callable[[str, int, int], None] = nobody,
    sites: Sites | None = None,
) -> Experiment:
    """Put a run together. `start` is the start that the run once took from `init`, instead of reading it again.

    `progress` follows downloads, and `working` long work of the method on the server. `sites` take the place of an
    engine on this machine.
    """
    device = make_device(config.device)
    engine_class = PlainEngine if sites is not None else _engine_class(config, device)
    ground = _lay_ground(config, own, progress, start, working, engine_class, sites.seen if sites else None)
    config = ground.config
    parts = ground.composition.build(ground.context)
    if ground.privacy is not None:
        refuse_unfit(ground.composition, parts, ground.layout)
        ground.privacy.account.epsilon(config.rounds)  # says now if it cannot be kept
    personal = parts.local.personal if parts.personalised(ground.layout) else None
    shop = ground.shop(parts.local, personal)
    engine: Engine
    if sites is not None:
        engine = sites.engine(shop)
    elif engine_class is HostEngine:
        engine = HostEngine(shop, config.workers)
    else:
        several = make_devices(config.device)
        engine = CudaEngine(shop, several, config.slots) if engine_class is CudaEngine else PlainEngine(shop, device)
    rounds = Rounds(config, ground.context, parts, engine, ground.federation.label_counts(), ground.privacy)
    return Experiment(
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


def build_shop(config: Config, own: Own | None = None) -> tuple[Config, Shop]:
    """What a site needs to train its clients: everything but the server's parts, which may be large."""
    ground = _lay_ground(config, own, None, None, nobody, PlainEngine, None)
    local = ground.composition.build_local(ground.context)
    server = ground.composition.part_class("server")
    personal = local.personal if personalised(server, local, ground.layout) else None
    return ground.config, ground.shop(local, personal)


@dataclass
class _Ground:
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
            home=homes,
            stays_home=tuple(stays),
        )
        try_out(workshop, federation)
        set_precision(self.context.device, config.precision, not config.fast)
        train = local.train if self.privacy is None else self.privacy.on_client(local.train)
        return Shop(workshop, federation, train, Homes(homes, layout.dtype), personal)


def _lay_ground(
    config: Config,
    own: Own | None,
    progress: Progress | None,
    start: Mapping[str, Tensor] | None,
    working: Callable[[str, int, int], None],
    engine_class: type[Engine],
    seen: Callable[[Federation], Federation] | None,
) -> _Ground:
    own = own or Own()
    composition = check(config)
    config = with_server_data(pin_partition(config), own, [composition])
    streams = Streams(config.seed)
    device = make_device(config.device)
    federation, class_names, notes, held = _federation(config, own, streams, progress)
    if held is not None:
        _refuse_labels(held, federation, composition)
        notes = (*notes, held.sentence(composition.use_server_data))
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
        beginning = begin_with(module, source, streams, config.model, config.new_head, class_names)
    wanted = config.channels_last
    if wanted is None:
        wanted = device.type == "cpu" or config.precision == "bf16"
    channels_last = wanted and len(federation.shape) == 3
    layout = Layout.of(module, channels_last=channels_last)
    privacy = Privacy.of(config, len(federation), streams)
    rounds = config.rounds if privacy is None else privacy.rounds_of(config)
    if rounds < config.rounds:
        notes = (*notes, f"max_epsilon {config.max_epsilon:g} is enough for {rounds} of {config.rounds} rounds.")
    context = Context(
        layout=layout,
        initial=layout.read(module, device),
        clients=len(federation),
        per_round=config.cohort,
        rounds=rounds,
        streams=streams,
        training=config,
        samples=federation.samples,
        criterion=own.loss or (F.cross_entropy if federation.classes else F.mse_loss),
        make_module=lambda: _copy(module, share_frozen=True),
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
    return _Ground(
        config, composition, federation, class_names, notes, module, beginning, layout, channels_last, context, privacy
    )


def pin_partition(config: Config) -> Config:
    """The config with the checksum of the file that its partition is read from, if it is; another file is refused."""
    path = config.partition_file
    if path is None:
        return config
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read the partition {path}: {error.strerror or error}.") from None
    if config.partition_sha256 not in (None, found):
        raise InputError(f"{path} is another partition than the one with the SHA-256 {config.partition_sha256}.")
    return replace_config(config, partition_sha256=found)


def with_server_data(config: Config, own: Own, compositions: Sequence[Composition]) -> Config:
    """The config with data for the server, where one of these methods needs some and nobody has said which."""
    if config.server_data is not None or not any(one.use_server_data for one in compositions):
        return config
    brought = own.data is not None and own.data.server_data is not None
    return replace_config(config, server_data=on_server.OWN if brought else on_server.DEFAULT)


def _refuse_labels(held: ServerData, federation: Federation, composition: Composition) -> None:
    """Refuse labels of the server's data that are not those of the clients, where a method uses them."""
    users = [method.name for method in composition.methods if method.server_data == "labels"]
    if not users:
        return
    if held.classes != federation.classes:
        raise InputError(
            f"{users[0]} uses the labels of the server's data, but {held.source!r} has {held.classes} classes and "
            f"{federation.name!r} {federation.classes}."
        )
    y = held.samples.y
    if held.classes and (y.min() < 0 or y.max() >= held.classes):
        span = f"labels from {y.min()} to {y.max()}"
        raise InputError(f"the server's data have {span}; expected labels from 0 to {held.classes - 1}.")


def make_device(name: str) -> torch.device:
    """The device called `name`, found to be usable; of several the first, where the server is."""
    return make_devices(name)[0]


def make_devices(names: str) -> tuple[torch.device, ...]:
    """The devices that `names` lists, separated by commas, found to be usable."""
    found = tuple(_usable_device(name.strip()) for name in names.split(","))
    if len(found) > 1 and (any(device.index is None for device in found) or len(set(found)) < len(found)):
        raise InputError(f"several devices are different ones, such as cuda:0,cuda:1, not {names!r}.")
    return found


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device is cpu, cuda, cuda:N or several as cuda:0,cuda:1, not {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device is cpu, cuda, cuda:N or several as cuda:0,cuda:1, not {name!r}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"device {name!r} cannot be used here: {reason}.") from error
    return device


def _engine_class(config: Config, device: torch.device) -> type[Engine]:
    if config.engine == "plain":
        if "," in config.device:
            raise InputError(f"the plain engine computes on one device, not on {config.device!r}.")
        return PlainEngine
    if device.type == "cuda":
        return CudaEngine
    if not can_fork():
        if config.engine == "host":
            raise InputError("the host engine needs a system that can fork processes; use --engine plain.")
        return PlainEngine
    return HostEngine


def _federation(
    config: Config, own: Own, streams: Streams, progress: Progress | None
) -> tuple[Federation, tuple[str, ...], tuple[str, ...], ServerData | None]:
    """The clients' data, the names of the classes, what a person should know about it, and the server's data."""
    source, draw = config.server_data, streams.numpy("server data")
    held: ServerData | None = None
    if own.data is not None:
        if config.partition != "own":
            raise InputError(f"the data {own.data.name!r} is spread over its clients already; leave partition out.")
        if config.classes is not None:
            raise InputError(f"classes are picked from a data set known by name, and {own.data.name!r} is your own.")
        if config.normalize != "default":
            raise InputError(f"{own.data.name!r} is your own and says by `prepare` how it is normalised.")
        if config.client_test:
            raise InputError(f"client_test divides a data set known by name, and {own.data.name!r} is your own.")
        federation = own.data
        if source is not None and (source == on_server.OWN or on_server.is_split(source)):
            federation, held = on_server.of_federation(federation, source, draw)
        elif source is not None:
            held = on_server.of_another(federation, source, partial(datasets.load, progress=progress))
        return federation, (), (), held
    if source == on_server.OWN:
        raise InputError(f"server_data {source!r} is what data of your own bring along; {config.data!r} brings none.")
    dataset = datasets.keep_classes(datasets.load(config.data, progress=progress), config.classes)
    dataset = datasets.normalized(dataset, config.normalize)
    if config.client_test:
        dataset = datasets.merge(dataset)
    back = on_server.keep_back(source, len(dataset.train), draw)
    pooled = datasets.build(dataset, config.partition, config.clients, streams.numpy("partition"), back)
    if source is not None and len(back):
        held = ServerData(dataset.train.take(back), source, dataset.classes)
    elif source is not None:
        held = on_server.of_another(pooled, source, partial(datasets.load, progress=progress))
    if config.client_test:
        pooled = datasets.hold_out(pooled, config.client_test, streams.numpy("client test"))
    return pooled, dataset.class_names, dataset.notes, held


def make_module(
    name: str,
    own: nn.Module | Callable[[], nn.Module] | None,
    federation: Federation,
    streams: Streams,
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
        with streams.globally("init"):
            return models.build(name, federation.shape, outputs, federation.tokens)
    module: object = own
    if callable(module) and not isinstance(module, nn.Module):
        with streams.globally("init"):
            module = module()
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a name, an nn.Module or what makes one, not {type(module).__name__}.")
    # A copy, because training binds a module's tensors to rows. Frozen weights stay shared, they never change; on
    # another device, or where a file is read into them, they must not be, or the user's own would change.
    return _copy(module, share_frozen=shared)


def _targets(federation: Federation) -> int:
    """How many numbers a regression is to tell; 0 where the targets are no rows of numbers."""
    samples = _some_samples(federation)
    return samples.y.shape[1] if samples is not None and samples.y.ndim == 2 else 0


def _copy(module: nn.Module, *, share_frozen: bool) -> nn.Module:
    frozen = [p for p in module.parameters() if not p.requires_grad] if share_frozen else []
    return deepcopy(module, {id(p): p for p in frozen})


def try_out(workshop: Workshop, federation: Federation) -> None:
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
            loss = workshop.criterion(output, samples.y)
    except FedloomError:
        raise
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; its inputs are whole numbers, tokens, so it wants a network for text" if samples.are_tokens else ""
        raise InputError(f"the model cannot be trained on {federation.name!r}: {first.rstrip('.')}{hint}.") from error
    if loss.dim() != 0:
        raise InputError(f"the loss must be one number for a batch, not a tensor of shape {tuple(loss.shape)}.")
    if federation.classes and output.shape[-1] < federation.classes:
        raise InputError(
            f"the model has {output.shape[-1]} outputs, but {federation.name!r} has {federation.classes} classes."
        )


def _some_samples(federation: Federation) -> Samples | None:
    held = [federation.test] if federation.test is not None and len(federation.test) else []
    if isinstance(federation, PooledFederation) and len(federation.pool):
        held.append(federation.pool)
    if held and held[0].are_tokens:  # and the largest token, which no network may be too small for
        largest = [samples.take(samples.x.flatten(1).amax(1).argmax(keepdim=True)) for samples in held]
        return Samples(torch.cat([s.x for s in largest]), torch.cat([s.y for s in largest]))
    if held:
        return held[0][:2]
    if federation.blind:
        return None
    for client in range(min(len(federation), 1000)):
        samples = federation.client(client)
        if len(samples):
            return samples[:2]
    return None


def replace_config(config: Config, **values: Any) -> Config:
    """A config with some values changed, validated again."""
    return make_config({**config.model_dump(), **values})
