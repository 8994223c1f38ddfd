"""The ClientApp: it passes each Flower message to the site and returns the reply.

Flower starts a new process for every message. This process imports no torch and reads no data: it passes the message to
the site process (process.py), which keeps running. In Flower's simulation, whose processes keep running anyway, the
site lives in this process.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import FedloomError
from fedloom.flower.message import MessageRejected, SiteMessage, make_failure_message
from fedloom.flower.site.socket import request_over_site_socket

HERE = "here"
"""Value of `site` in the node configuration: answer in the process that Flower started."""

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from fedloom.flower.site.handlers import SiteHandler


def client_app(file: str) -> "ClientApp":
    """Return the ClientApp of the app that contains `file`."""
    from fedloom.flower.flwr_patches import require_supported_flwr

    require_supported_flwr()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    from fedloom.flower.records import message_from_flower_records, message_to_flower_records

    app, folder = ClientApp(), Path(file).resolve().parent

    def handle(message: "Message", context: "Context") -> "Message":
        answer = _answer_message(message_from_flower_records(message.content), context, folder)
        return Message(content=message_to_flower_records(answer), reply_to=message)

    app.train()(handle)
    app.evaluate()(handle)
    app.query()(handle)
    return app


def _answer_message(request: SiteMessage, context: "Context", app_folder: Path) -> SiteMessage:
    """Return this node's reply to a request."""
    setup = {
        "run_config": dict(context.run_config),
        "node_config": dict(context.node_config),
        "app_folder": str(app_folder),
    }
    folder = _site_directory(context)
    try:
        if context.node_config.get("site") == HERE or "ray" in sys.modules:
            return _site_here(json.dumps(setup, sort_keys=True), folder).handle(request)
        return request_over_site_socket(folder, setup, request)
    except (FedloomError, OSError) as error:
        return make_failure_message(
            request, str(error) if not isinstance(error, MessageRejected) else f"rejected: {error}"
        )


def _site_directory(context: "Context") -> Path:
    """Return the site's own folder: the one in the node configuration, or one named after the node."""
    given = context.node_config.get("folder")
    if given:
        return Path(str(given)).expanduser().absolute()
    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser().absolute()
    partition = context.node_config.get("partition-id")
    name = f"node-{context.node_id}" if partition is None else f"run-{context.run_id}-partition-{partition}"
    return home / "fedloom-sites" / name


@cache
def _site_here(setup: str, folder: Path) -> "SiteHandler":
    """Return a site in this process. Client states are in its folder, so any process may serve any client."""
    from fedloom.flower.site.handlers import SiteHandler

    header = json.loads(setup)
    return SiteHandler(header["run_config"], header["node_config"], Path(header["app_folder"]), folder)
