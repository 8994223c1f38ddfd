"""A site: it answers the server's questions about its clients with the same training as every other engine.

Questions are parcels. `hello`: who are you and how many samples have you; `train`: train this model; `score`: how does
your own model do. Others may be added with `handles`. Whatever goes wrong is an answer too, of the kind `failed`.

What the sites of one process have in common: the network, the method, a bench to train at.

A site of its own has a process of its own. In a simulation one process serves many sites, and making the same network
for each of them would take longer than the rounds.
"""

import importlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.config import Config, replace_config
from fedloom.core.layout import all_finite
from fedloom.data import FederatedDataset
from fedloom.errors import FedloomError, InputError, describe_error
from fedloom.flower.app import resolve_app_config
from fedloom.flower.message import MessageRejected, MessageRejectedPermanently, SiteMessage, make_failure_message
from fedloom.flower.site.state import SiteStateLost, SiteStateStore
from fedloom.flower.site_data import (
    SiteDataSpec,
    import_site_data_file,
    load_client_site_data,
    make_site_dataset,
    read_site_data_spec,
    restrict_site_data,
    site_data_clients,
)
from fedloom.flower.tensors import ModelTensorCodec, decode_tensor, encode_tensor
from fedloom.flower.trust.agreement import agreement_settings, check_agreement
from fedloom.runs.build import build_run_for_site
from fedloom.runs.resolve import UserObjects
from fedloom.training.local_training import EngineContext, evaluate_client, train_client
from fedloom.training.trainer import LocalTrainer
from fedloom.utils.storage import read_json, write_json
from fedloom.utils.system import make_private_directory


@dataclass(frozen=True)
class _SiteTrainingSetup:
    """Everything but the data of one site, and what its clients keep."""

    config: Config
    shop: EngineContext
    initial: Tensor
    """The model that all start from."""
    travel: ModelTensorCodec
    bench: LocalTrainer


_last: dict[str, _SiteTrainingSetup] = {}


def _make_training_setup(
    config: Config, own: Callable[[], UserObjects], task: SiteDataSpec | None = None
) -> _SiteTrainingSetup:
    """The equipment for this run; `own` brings data of this `task` where it has not been made before."""
    about = (task.classes, task.shape, task.tokens, task.prepare) if task is not None else ()
    key = config.model_dump_json() + repr(about)
    if key not in _last:
        _last.clear()
        complete, shop = build_run_for_site(config, own())
        workshop = shop.workshop
        initial = workshop.layout.read(workshop.module)  # before the bench changes the module
        travel = ModelTensorCodec(workshop.layout, workshop.stays_home)
        _last[key] = _SiteTrainingSetup(
            complete, shop, initial, travel, LocalTrainer(workshop, torch.device(complete.device))
        )
    return _last[key]


Handler = Callable[["SiteHandler", SiteMessage], SiteMessage]

HANDLERS: dict[str, Handler] = {}
"""What a site answers, by the kind of the question."""
GREETINGS: list[Callable[["SiteHandler"], Mapping[str, Any]]] = []
"""What a site says of itself beside its samples."""
EXTENSIONS: tuple[str, ...] = ("fedloom.flower.secure_recombination.site",)
"""Modules with handlers of their own, imported when a site starts."""


def register_message_handler(kind: str) -> Callable[[Handler], Handler]:
    """Let a function answer questions of this kind."""

    def note(handler: Handler) -> Handler:
        HANDLERS[kind] = handler
        return handler

    return note


def register_hello_handler(
    greeting: Callable[["SiteHandler"], Mapping[str, Any]],
) -> Callable[["SiteHandler"], Mapping[str, Any]]:
    """Let what a function returns be part of every site's answer to `hello`."""
    GREETINGS.append(greeting)
    return greeting


@dataclass(frozen=True)
class SiteTrainResult:
    """What came of one client's training; nothing of it is sent or kept yet."""

    row: Tensor
    uploads: Mapping[str, Tensor]
    home: Mapping[str, Tensor]
    samples: int
    loss: float
    steps: int


class SiteHandler:
    """One site of a run. `folder` is its own; what its clients keep lies there."""

    def __init__(self, given: Mapping[str, Any], node: Mapping[str, Any], app: Path, folder: Path) -> None:
        for name in EXTENSIONS:
            importlib.import_module(name)
        self.given, self.node, self.app, self.folder = dict(given), dict(node), app, folder
        make_private_directory(folder)
        self.name = _name_of(folder)
        """Who this site is, whatever its address: a random name that lies in its folder."""
        self.memory: dict[str, Any] = {}
        """Room for what handlers need between questions; it ends with this process."""
        self.clients = site_data_clients(self.node)
        """The clients of this site; empty until the server has given it a number."""
        torch.set_num_threads(int(self.node.get("threads", 1)))
        self._numbered_by = ""
        self._built = False

    def take_number(self, question: SiteMessage) -> None:
        """Be the client that the server of this run says, where the node's own configuration names none."""
        run, number = question.header["run"], question.header.get("assigned")
        if type(number) is int and number >= 0:
            write_json(self._number_file(run), {"client": number})
            self._be(number, run)
        elif run != self._numbered_by:
            self.clients = ()

    def recall_number(self, question: SiteMessage) -> None:
        """Be the client that this run's server said before this process was started."""
        run = question.header["run"]
        if not site_data_clients(self.node) and run != self._numbered_by and self._number_file(run).exists():
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
        module = import_site_data_file(self.app)
        task = read_site_data_spec(module)
        config = resolve_app_config(self.given, self.app, task, self.node)
        self.told = agreement_settings(config)
        check_agreement(self.node, self.folder, self.told)  # before any data are read
        config = replace_config(config, engine="plain", device=str(self.node.get("device", "cpu")))
        if task is None:
            made = _make_training_setup(config, UserObjects)
            federation: FederatedDataset = restrict_site_data(made.shop.federation, self.clients)
        else:
            if len(self.clients) != 1 or config.clients is None:
                raise InputError("a site with data of its own is one client, and the run says how many there are.")
            brought = load_client_site_data(module, self.node, self.clients[0])
            federation = mine = make_site_dataset(task, config.clients, self.clients[0], brought)
            made = _make_training_setup(config, lambda: UserObjects(data=mine), task)
        self.config, self.shop = made.config, replace(made.shop, federation=federation)
        self.initial, self.travel, self.bench = made.initial, made.travel, made.bench
        self.device, self.layout = made.bench.device, made.bench.layout
        self._built = True

    def answer(self, question: SiteMessage) -> SiteMessage:
        """What this site says to a question."""
        try:
            handler = HANDLERS.get(question.kind)
            if handler is None:
                raise MessageRejected(f"this site knows no question of the kind {question.kind!r}")
            _check_address(question)
            self.recall_number(question)
            return handler(self, question)
        except (Exception, SystemExit) as error:  # whatever a client's code does, the site goes on
            reason = str(error) if isinstance(error, FedloomError) else describe_error(error)
            return make_failure_message(question, reason, for_good=isinstance(error, MessageRejectedPermanently))

    def kept(self, question: SiteMessage) -> SiteStateStore:
        """What the client that is asked keeps, in this run."""
        return SiteStateStore(self.folder / question.header["run"] / f"client-{question.header['client']}")

    def train(self, question: SiteMessage) -> SiteTrainResult:
        """Train the client that is asked, from the model in the question."""
        self.build()
        client, layout = self._client(question), self.layout
        held, fewest = self.shop.federation.samples(client), self.shop.workshop.fewest
        if held < fewest:
            what = f"it has {held} samples, and {fewest} are needed"
            raise MessageRejected(f"what {self.config.method} sends beside a model would show its samples: {what}")
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
        return SiteTrainResult(row, uploads, home, samples, loss, steps)

    def stage(self, question: SiteMessage, trained: SiteTrainResult) -> None:
        """Write what the client wants to keep; it is kept once the server says that it took the update."""
        if trained.home:
            self.kept(question).stage(question.header["nonce"], trained.home)

    def score(self, question: SiteMessage) -> float | None:
        """The accuracy of the own model of the client that is asked; nothing of this is kept."""
        self.build()
        client, received = self._client(question), self._received(question)
        home, new = self._home(question)
        if self.shop.federation.test is None:
            return None
        row = self.layout.empty(self.device)
        return evaluate_client(self.bench, self.shop, question.header["round"], client, row, received, home, new)

    def _client(self, question: SiteMessage) -> int:
        client: int = question.header["client"]
        if client not in self.clients:
            raise MessageRejected(f"client {client} is not at this site")
        return client

    def _received(self, question: SiteMessage) -> Tensor:
        """The model that came, with the initial one's columns where they do not travel."""
        if "row" not in question.blocks:
            raise MessageRejected("there is no model in the question")
        return self.travel.unpack(question.blocks["row"], self.initial.clone(), "the model").to(self.device)

    def _tensor(self, question: SiteMessage, name: str) -> Tensor:
        block = question.blocks[name]
        return decode_tensor(block, getattr(torch, block.dtype), block.shape, name).to(self.device)

    def _home(self, question: SiteMessage) -> tuple[dict[str, Tensor], bool]:
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
            raise SiteStateLost("what it kept is not there any more; it will start anew")
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise SiteStateLost("what it kept is of another shape; it will start anew")
        return {name: tensor.to(self.device) for name, tensor in state.items()}, False


@register_message_handler("hello")
def _handle_hello(site: SiteHandler, question: SiteMessage) -> SiteMessage:
    """Who this site is, and how many samples its clients have and train on."""
    if not site_data_clients(site.node):
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


@register_message_handler("train")
def handle_train_message(site: SiteHandler, question: SiteMessage) -> SiteMessage:
    """Train, keep what is to be kept for the case that the server takes the update, and send the rest."""
    try:
        done = site.train(question)
    except SiteStateLost as error:
        return question.reply("failed", {"reason": str(error), "state_lost": True})
    site.stage(question, done)
    header = {"samples": done.samples, "loss": done.loss, "steps": done.steps}
    uploads = {f"upload/{name}": encode_tensor(tensor) for name, tensor in done.uploads.items()}
    return question.reply("trained", header, {"row": site.travel.pack(done.row), **uploads})


@register_message_handler("score")
def handle_evaluate_message(site: SiteHandler, question: SiteMessage) -> SiteMessage:
    """How the client's own model does."""
    return question.reply("scored", {"accuracy": site.score(question)})


def _name_of(folder: Path) -> str:
    path = folder / "site.json"
    if not path.exists():
        write_json(path, {"site": secrets.token_hex(16)})
    return str(read_json(path)["site"])


def _check_address(question: SiteMessage) -> None:
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
            raise MessageRejected(f"a question has the {name} {header.get(name)!r}")
