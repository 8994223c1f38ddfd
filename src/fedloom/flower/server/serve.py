"""The ServerApp: runs the rounds with the sites behind a transport."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.config import Config, replace_config
from fedloom.data.splits import OWN
from fedloom.errors import FedloomError, InputError
from fedloom.flower.app import ServerAppSettings, add_app_server_data, read_app_run_config, set_app_site_data
from fedloom.flower.flwr_patches import require_supported_flwr
from fedloom.flower.message import MOST_BYTES
from fedloom.flower.server.client_registry import LOG
from fedloom.flower.server.engine import FlowerEngineFactory
from fedloom.flower.server.transport import GridTransport, Transport, forward_transport_requests
from fedloom.flower.site_data import (
    SITE_DATA,
    SiteDataServerView,
    SiteDataSpec,
    import_site_data_file,
    make_empty_site_dataset,
    read_site_data_spec,
)
from fedloom.flower.trust.agreement import agreement_difference, agreement_settings
from fedloom.methods.composition import ComposedMethod
from fedloom.runs.callback import Callback, RunDescription, combine_callbacks
from fedloom.runs.directory import RunDirectory, claim_directory, is_run_directory, refuse_occupied_directory
from fedloom.runs.resolve import RunRequest, UserObjects, complete_request, record_partition_hash, resolve_method

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid


def serve_app(grid: "Grid", context: "Context", app_folder: Path) -> None:
    """Run the ServerApp of an app: start or resume its run."""
    try:
        require_supported_flwr()
        config, settings = read_app_run_config(context.run_config, app_folder)
        if settings.bridge:
            forward_transport_requests(GridTransport(grid, MOST_BYTES), Path(settings.bridge))
            return
        serve_run(GridTransport(grid), config, settings, app_folder)
    except FedloomError as error:
        LOG.error("%s", error)
        raise


def serve_run(transport: Transport, config: Config, settings: ServerAppSettings, app_folder: Path) -> Any:
    """Run an app over a transport, from the start or from its last checkpoint, and return the finished run."""
    from fedloom.runs.execute import execute_in_directory, resume_in_directory

    spec = read_site_data_spec(import_site_data_file(app_folder))
    config = set_app_site_data(config, spec)
    if not settings.folder:
        raise InputError('the run config must set the run directory on the server: folder = "/path".')
    folder, method = Path(settings.folder), resolve_method(config)
    _refuse_missing_data(config, method, spec)
    # Before the sites are asked, because another server may be using them.
    with combine_callbacks([_LogCallback()]) as callbacks, claim_directory(folder, _refuse_foreign):
        goes_on = is_run_directory(folder)
        if goes_on:
            _refuse_other_settings(folder, config, method, spec)
        sites = FlowerEngineFactory(transport, RunRequest(config, method), folder, settings.join)
        data = None
        if spec is not None and config.clients is not None:
            data = SiteDataServerView(make_empty_site_dataset(spec), config.clients, sites.registry.num_examples)
        if goes_on:
            LOG.info("continuing the run in %s", folder)
            return resume_in_directory(
                RunDirectory.open(folder), UserObjects(data=data), callbacks, remote_engine=sites
            )
        request = complete_request(config, method, UserObjects(data=data))
        return execute_in_directory(folder, request, callbacks, remote_engine=sites)


def _refuse_foreign(folder: Path) -> None:
    """Raise an InputError if the folder holds anything but a run."""
    if not is_run_directory(folder):
        refuse_occupied_directory(folder)


def _refuse_missing_data(config: Config, method: ComposedMethod, spec: SiteDataSpec | None) -> None:
    """Raise an InputError before the wait for sites if the method needs server data that are missing."""
    users = method.use_server_data
    if spec is not None and users and spec.server_data is None and config.server_data in (None, OWN):
        raise InputError(
            f"{users[0]} needs samples at the server, and {SITE_DATA} names none: "
            "give SiteDataSpec(..., server_data=(x, y)), "
            "or set server_data to the name of a data set."
        )


def _refuse_other_settings(folder: Path, config: Config, method: ComposedMethod, spec: SiteDataSpec | None) -> None:
    """Raise an InputError if a run would resume with its old settings while the sites get new ones."""
    before = RunDirectory.open(folder).config
    config = add_app_server_data(record_partition_hash(config), method, spec)
    config = replace_config(config, options=method.resolved_options())
    settings = [
        {k: v for k, v in agreement_settings(one).items() if not k.endswith("_sha256")} for one in (before, config)
    ]
    if (found := agreement_difference(*settings)) is not None:
        raise InputError(
            f"{folder} holds a run with {found[0]}, and this one has {found[1]}: give the same settings to resume it, "
            "or another folder."
        )


class _LogCallback(Callback):
    """Callback that writes the progress of a run to Flower's log."""

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        rounds = f"{config.rounds} round{'' if config.rounds == 1 else 's'}"
        LOG.info("%s on %s, %s, in %s", config.label, config.data, rounds, folder)

    def on_message(self, text: str) -> None:
        LOG.info("%s", text)

    def on_round_end(self, record: Any) -> None:
        accuracy = record.get("accuracy")
        words = [f"round {record['round']}"]
        if accuracy is not None:
            words.append(f"accuracy {100 * accuracy:.2f} %")
        if record.get("clients"):
            words.append(f"{record['clients'] - record['failed']} of {record['clients']} clients answered")
        LOG.info("%s", ", ".join(words))
        for client_id, reason in record.get("failed_clients", {}).items():
            LOG.log(logging.WARNING, "round %d: client %s: %s", record["round"], client_id, reason)
