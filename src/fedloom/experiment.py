"""From a config to something that runs: data, network, method and engine put together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.data import Federation
from fedloom.data.download import Progress
from fedloom.devices import engine_class, make_device, make_engine
from fedloom.engines import Engine, PlainEngine, Shop
from fedloom.errors import InputError
from fedloom.ground import lay_ground
from fedloom.initial import Beginning
from fedloom.methods.base import nobody
from fedloom.methods.catalogue import Composition
from fedloom.privacy import refuse_unfit
from fedloom.request import Own
from fedloom.rounds import Rounds
from fedloom.rows import Layout

LAYOUT = "layout"
"""Where a state says what its models look like."""


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
    chosen = PlainEngine if sites is not None else engine_class(config, device)
    seen = sites.seen if sites is not None else None
    ground = lay_ground(config, own, chosen, progress, start, working, seen, over_sites=sites is not None)
    config = ground.config
    parts = ground.composition.build(ground.context)
    if ground.privacy is not None:
        refuse_unfit(ground.composition, parts, ground.layout)
        ground.privacy.account.epsilon(config.rounds)  # says now if it cannot be kept
    personal = parts.local.personal if parts.personalised(ground.layout) else None
    shop = ground.shop(parts.local, personal)
    engine = sites.engine(shop) if sites is not None else make_engine(chosen, shop, config)
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
