"""A site: it answers the server's questions about its clients with the same training as every other engine.

Questions are parcels. `hello`: who are you and how many samples have you; `train`: train this model; `score`: how does
your own model do. Others may be added with `handles`. Whatever goes wrong is an answer too, of the kind `failed`.
"""

import importlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.data import Federation
from fedloom.engines.base import reason_of, score_client, train_client
from fedloom.errors import FedloomError, InputError
from fedloom.flower.agreement import heed, settled, told_by
from fedloom.flower.app import brought_by, load_site_data, task_of
from fedloom.flower.data import clients_of, confined, of_site
from fedloom.flower.equipment import equip
from fedloom.flower.kept import Kept
from fedloom.flower.parcel import Parcel, Refused, RefusedForGood, failed
from fedloom.flower.tensors import from_block, to_block
from fedloom.request import Own, replace_config
from fedloom.rows import all_finite
from fedloom.storage import read_json, write_json

Handler = Callable[["Site", Parcel], Parcel]

HANDLERS: dict[str, Handler] = {}
"""What a site answers, by the kind of the question."""
GREETINGS: list[Callable[["Site"], Mapping[str, Any]]] = []
"""What a site says of itself beside its samples."""
EXTENSIONS: tuple[str, ...] = ("fedloom.flower.relay_site",)
"""Modules with handlers of their own, imported when a site starts."""


def handles(kind: str) -> Callable[[Handler], Handler]:
    """Let a function answer questions of this kind."""

    def note(handler: Handler) -> Handler:
        HANDLERS[kind] = handler
        return handler

    return note


def greets(greeting: Callable[["Site"], Mapping[str, Any]]) -> Callable[["Site"], Mapping[str, Any]]:
    """Let what a function returns be part of every site's answer to `hello`."""
    GREETINGS.append(greeting)
    return greeting


@dataclass(frozen=True)
class Trained:
    """What came of one client's training; nothing of it is sent or kept yet."""

    row: Tensor
    uploads: Mapping[str, Tensor]
    home: Mapping[str, Tensor]
    samples: int
    loss: float
    steps: int


class Site:
    """One site of a run. `folder` is its own; what its clients keep lies there."""

    def __init__(self, given: Mapping[str, Any], node: Mapping[str, Any], app: Path, folder: Path) -> None:
        for name in EXTENSIONS:
            importlib.import_module(name)
        self.given, self.node, self.app, self.folder = dict(given), dict(node), app, folder
        make_private(folder)
        self.name = _name_of(folder)
        """Who this site is, whatever its address: a random name that lies in its folder."""
        self.memory: dict[str, Any] = {}
        """Room for what handlers need between questions; it ends with this process."""
        self.clients = clients_of(self.node)
        """The clients of this site; empty until the server has given it a number."""
        torch.set_num_threads(int(self.node.get("threads", 1)))
        self._numbered_by = ""
        self._built = False

    def take_number(self, question: Parcel) -> None:
        """Be the client that the server of this run says, where the node's own configuration names none."""
        run, number = question.header["run"], question.header.get("assigned")
        if type(number) is int and number >= 0:
            write_json(self._number_file(run), {"client": number})
            self._be(number, run)
        elif run != self._numbered_by:
            self.clients = ()

    def recall_number(self, question: Parcel) -> None:
        """Be the client that this run's server said before this process was started."""
        run = question.header["run"]
        if not clients_of(self.node) and run != self._numbered_by and self._number_file(run).exists():
            self._be(int(read_json(self._number_file(run))["client"]), run)

    def _be(self, number: int, run: str) -> None:
        self._built &= self.clients == (number,)
        self.clients, self._numbered_by = (number,), run

    def _number_file(self, run: str) -> Path:
        return self.folder / run / "number.json"

    def build(self) -> None:
        """Read the data and make the network, once; not for settings that the site's operator did not agree to."""
        if self._built:
            return
        module = load_site_data(self.app)
        task = task_of(module)
        config = settled(self.given, self.app, task, self.node)
        self.told = told_by(config)
        heed(self.node, self.folder, self.told)  # before any data are read
        config = replace_config(config, engine="plain", device=str(self.node.get("device", "cpu")))
        if task is None:
            made = equip(config, Own)
            federation: Federation = confined(made.shop.federation, self.clients)
        else:
            if len(self.clients) != 1 or config.clients is None:
                raise InputError("a site with data of its own is one client, and the run says how many there are.")
            brought = brought_by(module, self.node, self.clients[0])
            federation = mine = of_site(task, config.clients, self.clients[0], brought)
            made = equip(config, lambda: Own(data=mine), task)
        self.config, self.shop = made.config, replace(made.shop, federation=federation)
        self.initial, self.travel, self.bench = made.initial, made.travel, made.bench
        self.device, self.layout = made.bench.device, made.bench.layout
        self._built = True

    def answer(self, question: Parcel) -> Parcel:
        """What this site says to a question."""
        try:
            handler = HANDLERS.get(question.kind)
            if handler is None:
                raise Refused(f"this site knows no question of the kind {question.kind!r}")
            _check_address(question)
            self.recall_number(question)
            return handler(self, question)
        except (Exception, SystemExit) as error:  # whatever a client's code does, the site goes on
            reason = str(error) if isinstance(error, FedloomError) else reason_of(error)
            return failed(question, reason, for_good=isinstance(error, RefusedForGood))

    def kept(self, question: Parcel) -> Kept:
        """What the client that is asked keeps, in this run."""
        return Kept(self.folder / question.header["run"] / f"client-{question.header['client']}")

    def train(self, question: Parcel) -> Trained:
        """Train the client that is asked, from the model in the question."""
        self.build()
        client, layout = self._client(question), self.layout
        held, fewest = self.shop.federation.samples(client), self.shop.workshop.fewest
        if held < fewest:
            what = f"it has {held} samples, and {fewest} are needed"
            raise Refused(f"what {self.config.method} sends beside a model would show its samples: {what}")
        received = self._received(question)
        extras = {
            name.removeprefix("extra/"): self._tensor(question, name)
            for name in question.blocks
            if name.startswith("extra/")
        }
        home, new = self._home(question)
        uploads = {
            name: torch.zeros(shape, dtype=layout.dtype, device=self.device)
            for name, shape in self.shop.workshop.uploads.items()
        }
        row = layout.empty(self.device)
        samples, loss, steps = train_client(
            self.bench, self.shop, question.header["round"], client, row, received, extras, home, uploads, new
        )
        for name, tensor in home.items():
            if not all_finite(tensor):
                raise FedloomError(f"the {name.removeprefix('@')} that it keeps is not finite")
        return Trained(row, uploads, home, samples, loss, steps)

    def stage(self, question: Parcel, trained: Trained) -> None:
        """Write what the client wants to keep; it is kept once the server says that it took the update."""
        if trained.home:
            self.kept(question).stage(question.header["nonce"], trained.home)

    def score(self, question: Parcel) -> float | None:
        """The accuracy of the own model of the client that is asked; nothing of this is kept."""
        self.build()
        client, received = self._client(question), self._received(question)
        home, new = self._home(question)
        if self.shop.federation.test is None:
            return None
        row = self.layout.empty(self.device)
        return score_client(self.bench, self.shop, question.header["round"], client, row, received, home, new)

    def _client(self, question: Parcel) -> int:
        client: int = question.header["client"]
        if client not in self.clients:
            raise Refused(f"client {client} is not at this site")
        return client

    def _received(self, question: Parcel) -> Tensor:
        """The model that came, with the initial one's columns where they do not travel."""
        if "row" not in question.blocks:
            raise Refused("there is no model in the question")
        return self.travel.unpack(question.blocks["row"], self.initial.clone(), "the model").to(self.device)

    def _tensor(self, question: Parcel, name: str) -> Tensor:
        block = question.blocks[name]
        return from_block(block, getattr(torch, block.dtype), block.shape, name).to(self.device)

    def _home(self, question: Parcel) -> tuple[dict[str, Tensor], bool]:
        """A copy of what the client keeps, and whether this is its first visit."""
        shapes, dtype = self.shop.workshop.home, self.layout.dtype
        if not shapes:
            return {}, True
        accepted, kept = question.header.get("accepted"), self.kept(question)
        if accepted is None:
            kept.forget()
            return {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, shape in shapes.items()}, True
        state = kept.get(accepted)
        if state is None:
            raise StateLost("what it kept is not there any more; it will start anew")
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise StateLost("what it kept is of another shape; it will start anew")
        return {name: tensor.to(self.device) for name, tensor in state.items()}, False


class StateLost(FedloomError):
    """The site has not the state that the server believes its client to have."""


@handles("hello")
def hello(site: Site, question: Parcel) -> Parcel:
    """Who this site is, and how many samples its clients have and train on."""
    if not clients_of(site.node):
        site.take_number(question)
    if not site.clients:
        return question.reply("hello", {"site": site.name, "clients": {}})
    site.build()
    training, layout = site.shop.workshop.training, site.layout
    counts = {}
    for client in site.clients:
        total = site.shop.federation.samples(client)
        held = min(int(training.validation * total + 0.5), max(0, total - 1))
        counts[str(client)] = [total, total - held]
    about = {
        "site": site.name,
        "clients": counts,
        "layout": layout.fingerprint(),
        "versions": {"fedloom": __version__, "torch": torch.__version__},
    }
    for greeting in GREETINGS:
        about.update(greeting(site))
    return question.reply("hello", about)


@handles("train")
def train(site: Site, question: Parcel) -> Parcel:
    """Train, keep what is to be kept for the case that the server takes the update, and send the rest."""
    try:
        done = site.train(question)
    except StateLost as error:
        return question.reply("failed", {"reason": str(error), "state_lost": True})
    site.stage(question, done)
    header = {"samples": done.samples, "loss": done.loss, "steps": done.steps}
    uploads = {f"upload/{name}": to_block(tensor) for name, tensor in done.uploads.items()}
    return question.reply("trained", header, {"row": site.travel.pack(done.row), **uploads})


@handles("score")
def score(site: Site, question: Parcel) -> Parcel:
    """How the client's own model does."""
    return question.reply("scored", {"accuracy": site.score(question)})


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can look into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is not writable")
    except OSError as error:
        raise InputError(f"cannot use the site's folder {folder}: {error.strerror or error}.") from None


def _name_of(folder: Path) -> str:
    path = folder / "site.json"
    if not path.exists():
        write_json(path, {"site": secrets.token_hex(16)})
    return str(read_json(path)["site"])


def _check_address(question: Parcel) -> None:
    """What a question says of itself comes from outside, and names folders and streams."""
    header = question.header
    fits = {
        "run": isinstance(header.get("run"), str) and re.fullmatch(r"[0-9a-f]{32}", header["run"]),
        "nonce": isinstance(header.get("nonce"), str) and re.fullmatch(r"[0-9a-f]{32}", header["nonce"]),
        "round": type(header.get("round")) is int and 0 <= header["round"] < 1 << 32,
        "client": type(header.get("client")) is int and -1 <= header["client"] < 1 << 32,
    }
    for name, right in fits.items():
        if not right:
            raise Refused(f"a question has the {name} {header.get(name)!r}")
