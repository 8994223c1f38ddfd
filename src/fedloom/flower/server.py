"""The server's side of an app: the rounds of `api.py`, played with the sites behind a link."""

import importlib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.config import Config
from fedloom.data import Federation
from fedloom.data.server import OWN
from fedloom.engines.base import Engine, Shop
from fedloom.engines.flower import FlowerEngine, UpdateExchange
from fedloom.errors import FedloomError, InputError
from fedloom.flower.agreement import apart, told_by, with_servers_data
from fedloom.flower.app import SITE_DATA, ServerSettings, load_site_data, read_settings, task_of, with_task
from fedloom.flower.data import ServerFederation, Task, described
from fedloom.flower.flwr_patches import require_flower
from fedloom.flower.link import GridLink, Link
from fedloom.flower.parcel import MOST_BYTES
from fedloom.flower.roster import LOG, Roster
from fedloom.folder import RunFolder, claimed, is_run, refuse_occupied
from fedloom.request import Own, check, pin_partition, replace_config
from fedloom.settings import Plan
from fedloom.watching import Silent

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

SITES_FILE = "sites.json"
"""Where the run's folder says which site has which client."""


EXCHANGE = "fedloom.flower.relay_server"
"""The module that knows what sites exchange before the server gets their updates."""


def update_exchange(config: Config, shop: Shop) -> UpdateExchange | None:
    """What the sites of this run exchange; None: nothing."""
    exchange: UpdateExchange | None = importlib.import_module(EXCHANGE).exchange_for(config, shop.workshop.layout)
    return exchange


class Behind:
    """The sites behind a link, as a run wants them (`experiment.Sites`)."""

    def __init__(self, link: Link, config: Config, folder: Path, join: float) -> None:
        if config.clients is None:
            raise InputError("a run over sites must say how many clients there are; give --clients.")
        self._link, self._config = link, config
        self._file = folder / SITES_FILE
        self.roster = Roster(config.clients)
        self.roster.load(self._file)
        self.roster.join(link, join)

    def seen(self, federation: Federation) -> Federation:
        return ServerFederation(federation, len(federation), self.roster.samples)

    def engine(self, shop: Shop) -> Engine:
        if isinstance(self._link, GridLink):
            self._link.most = _largest_answer(shop)
        exchange = update_exchange(self._config, shop)
        return FlowerEngine(shop, self._link, self.roster, self._config.deadline, self._file, exchange)


def serve(grid: "Grid", context: "Context", app: Path) -> None:
    """What the ServerApp of a written app does: play the run, or go on with it."""
    try:
        require_flower()
        config, settings = read_settings(context.run_config, app)
        if settings.bridge:
            from fedloom.flower.bridge import carry

            carry(GridLink(grid, MOST_BYTES), Path(settings.bridge))
            return
        play(GridLink(grid), config, settings, app)
    except FedloomError as error:
        LOG.error("%s", error)
        raise


def play(link: Link, config: Config, settings: ServerSettings, app: Path) -> Any:
    """Play the run of an app over a link, from its beginning or from its last checkpoint; returns the finished run."""
    from fedloom.api import execute_in, resume_in

    task = task_of(load_site_data(app))
    config = with_task(config, task)
    if not settings.folder:
        raise InputError('the run config must name the run\'s folder on the server: folder = "/path".')
    folder, watcher = Path(settings.folder), Told()
    _refuse_missing_data(config, task)
    with claimed(folder, _refuse_foreign):  # before the sites are asked: another server may be at work with them
        goes_on = is_run(folder)
        if goes_on:
            _refuse_other_settings(folder, config, task)
        sites = Behind(link, config, folder, settings.join)
        data = None
        if task is not None and config.clients is not None:
            data = ServerFederation(described(task), config.clients, sites.roster.samples)
        if goes_on:
            LOG.info("going on with the run in %s", folder)
            return resume_in(RunFolder.open(folder), Own(data=data), watcher, sites=sites)
        config = replace_config(config, options=check(config).stated())
        return execute_in(folder, config, Own(data=data), watcher, sites=sites)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds something else than a run."""
    if not is_run(folder):
        refuse_occupied(folder)


def _refuse_missing_data(config: Config, task: Task | None) -> None:
    """Say before anybody waits for sites that the server has not what the method needs."""
    users = check(config).use_server_data
    if task is not None and users and task.server_data is None and config.server_data in (None, OWN):
        raise InputError(
            f"{users[0]} needs samples at the server, and {SITE_DATA} names none: give Task(..., server_data=(x, y)), "
            "or the setting server_data the name of a data set."
        )


def _refuse_other_settings(folder: Path, config: Config, task: Task | None) -> None:
    """A run goes on with the settings that it has; sites would be told the new ones."""
    before = RunFolder.open(folder).config
    config = with_servers_data(pin_partition(config), task)
    config = replace_config(config, options=check(config).stated())
    told = [{k: v for k, v in told_by(one).items() if not k.endswith("_sha256")} for one in (before, config)]
    if (found := apart(*told)) is not None:
        raise InputError(
            f"{folder} holds a run with {found[0]}, and this one has {found[1]}: give the same settings to go on, or "
            "else another folder."
        )


def _largest_answer(shop: Shop) -> int:
    """Bytes that no honest answer has: a model and what goes with it, twice, for what is sealed is a little larger."""
    workshop = shop.workshop
    numbers = workshop.layout.size + sum(math.prod(shape) for shape in workshop.uploads.values())
    return (1 << 20) + 2 * numbers * workshop.layout.dtype.itemsize


class Told(Silent):
    """A watcher that writes what happens to Flower's log."""

    def begin(self, folder: Path, config: Plan, history: list[dict[str, Any]]) -> None:
        rounds = f"{config.rounds} round{'' if config.rounds == 1 else 's'}"
        LOG.info("%s on %s, %s, in %s", config.method, config.data, rounds, folder)

    def note(self, text: str) -> None:
        LOG.info("%s", text)

    def record(self, record: Any) -> None:
        accuracy = record.get("accuracy")
        words = [f"round {record['round']}"]
        if accuracy is not None:
            words.append(f"accuracy {100 * accuracy:.2f} %")
        if record.get("clients"):
            words.append(f"{record['clients'] - record['lost']} of {record['clients']} clients answered")
        LOG.info("%s", ", ".join(words))
        for client, reason in record.get("lost_clients", {}).items():
            LOG.log(logging.WARNING, "round %d: client %s: %s", record["round"], client, reason)
