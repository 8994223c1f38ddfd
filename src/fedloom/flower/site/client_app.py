"""The ClientApp: it takes a message from Flower, lets the site answer it, and hands the answer back.

Flower starts a new process for every message. This one imports no torch and reads no data: it passes the message on to
the site's own process (site_process.py), which stays. In Flower's simulation, where processes stay anyway, the site is
in this process.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import FedloomError
from fedloom.flower.message import MessageRejected, SiteMessage, make_failure_message
from fedloom.flower.site.socket import ask_site_process

HERE = "here"
"""As `site` in a node's configuration: answer in the process of the message itself."""

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from fedloom.flower.site.handlers import SiteHandler


def client_app(file: str) -> "ClientApp":
    """The ClientApp of the app that `file` is part of."""
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


def _answer_message(question: SiteMessage, context: "Context", app: Path) -> SiteMessage:
    """What the site of this node says to a question."""
    setup = {"given": dict(context.run_config), "node": dict(context.node_config), "app": str(app)}
    folder = _site_directory(context)
    try:
        if context.node_config.get("site") == HERE or "ray" in sys.modules:
            return _site_here(setup, folder).answer(question)
        return ask_site_process(folder, setup, question)
    except (FedloomError, OSError) as error:
        return make_failure_message(
            question, str(error) if not isinstance(error, MessageRejected) else f"refused: {error}"
        )


def _site_directory(context: "Context") -> Path:
    """The site's own folder: the one its node's configuration names, or one that is named after the node."""
    given = context.node_config.get("folder")
    if given:
        return Path(str(given)).expanduser().absolute()
    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser().absolute()
    partition = context.node_config.get("partition-id")
    name = f"node-{context.node_id}" if partition is None else f"run-{context.run_id}-partition-{partition}"
    return home / "fedloom-sites" / name


_here: dict[str, "SiteHandler"] = {}


def _site_here(setup: dict[str, Any], folder: Path) -> "SiteHandler":
    """A site in this process. What its clients keep lies in its folder, so any process may serve any of them."""
    from fedloom.flower.site.handlers import SiteHandler

    key = hashlib.sha256(json.dumps([setup, str(folder)], sort_keys=True).encode()).hexdigest()
    if key not in _here:
        _here[key] = SiteHandler(setup["given"], setup["node"], Path(setup["app"]), folder)
    return _here[key]
