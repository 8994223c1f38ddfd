"""The server's side of an app: the rounds of `api.py`, played with the sites behind a link."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.config import Config, replace_config
from fedloom.data.splits import OWN
from fedloom.errors import FedloomError, InputError
from fedloom.flower.app import ServerAppSettings, add_app_server_data, read_app_run_config, with_site_data_spec
from fedloom.flower.flwr_patches import require_flower
from fedloom.flower.message import MOST_BYTES
from fedloom.flower.server.client_registry import LOG
from fedloom.flower.server.engine import FlowerEngineFactory
from fedloom.flower.server.transport import GridTransport, Transport
from fedloom.flower.site_data import (
    SITE_DATA,
    SiteDataServerView,
    SiteDataSpec,
    import_site_data_file,
    make_empty_site_dataset,
    read_site_data_spec,
)
from fedloom.flower.trust.agreement import agreement_difference, agreement_settings
from fedloom.runs.callback import RunDescription, SilentCallback
from fedloom.runs.directory import RunDirectory, claimed, is_run_directory, refuse_occupied
from fedloom.runs.resolve import UserObjects, record_partition_hash, resolve_method

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid


def serve_app(grid: "Grid", context: "Context", app: Path) -> None:
    """What the ServerApp of a written app does: play the run, or go on with it."""
    try:
        require_flower()
        config, settings = read_app_run_config(context.run_config, app)
        if settings.bridge:
            from fedloom.flower.server.transport import forward_transport_requests

            forward_transport_requests(GridTransport(grid, MOST_BYTES), Path(settings.bridge))
            return
        serve_run(GridTransport(grid), config, settings, app)
    except FedloomError as error:
        LOG.error("%s", error)
        raise


def serve_run(link: Transport, config: Config, settings: ServerAppSettings, app: Path) -> Any:
    """Play the run of an app over a link, from its beginning or from its last checkpoint; returns the finished run."""
    from fedloom.runs.execute import execute_in, resume_in

    task = read_site_data_spec(import_site_data_file(app))
    config = with_site_data_spec(config, task)
    if not settings.folder:
        raise InputError('the run config must name the run\'s folder on the server: folder = "/path".')
    folder, watcher = Path(settings.folder), _LogCallback()
    _refuse_missing_data(config, task)
    with claimed(folder, _refuse_foreign):  # before the sites are asked: another server may be at work with them
        goes_on = is_run_directory(folder)
        if goes_on:
            _refuse_other_settings(folder, config, task)
        sites = FlowerEngineFactory(link, config, folder, settings.join)
        data = None
        if task is not None and config.clients is not None:
            data = SiteDataServerView(make_empty_site_dataset(task), config.clients, sites.roster.samples)
        if goes_on:
            LOG.info("going on with the run in %s", folder)
            return resume_in(RunDirectory.open(folder), UserObjects(data=data), watcher, sites=sites)
        config = replace_config(config, options=resolve_method(config).stated())
        return execute_in(folder, config, UserObjects(data=data), watcher, sites=sites)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds something else than a run."""
    if not is_run_directory(folder):
        refuse_occupied(folder)


def _refuse_missing_data(config: Config, task: SiteDataSpec | None) -> None:
    """Say before anybody waits for sites that the server has not what the method needs."""
    users = resolve_method(config).use_server_data
    if task is not None and users and task.server_data is None and config.server_data in (None, OWN):
        raise InputError(
            f"{users[0]} needs samples at the server, and {SITE_DATA} names none: "
            "give SiteDataSpec(..., server_data=(x, y)), "
            "or the setting server_data the name of a data set."
        )


def _refuse_other_settings(folder: Path, config: Config, task: SiteDataSpec | None) -> None:
    """A run goes on with the settings that it has; sites would be told the new ones."""
    before = RunDirectory.open(folder).config
    config = add_app_server_data(record_partition_hash(config), task)
    config = replace_config(config, options=resolve_method(config).stated())
    told = [{k: v for k, v in agreement_settings(one).items() if not k.endswith("_sha256")} for one in (before, config)]
    if (found := agreement_difference(*told)) is not None:
        raise InputError(
            f"{folder} holds a run with {found[0]}, and this one has {found[1]}: give the same settings to go on, or "
            "else another folder."
        )


class _LogCallback(SilentCallback):
    """A watcher that writes what happens to Flower's log."""

    def begin(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
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
