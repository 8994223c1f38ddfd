"""Message handlers of a site: train and evaluate its clients.

A `hello` request asks for the site's clients and numbers of samples, `train` for a trained model, `evaluate` for the
accuracy of a personal model. `register_message_handler` adds kinds. Every error becomes a reply of the kind `failed`.

The sites of one process share the network, the method and the trainer. In production each site has its own process. In
a simulation one process serves many sites, and building the network for each of them would take longer than the rounds.
"""

import importlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.config import Config, replace_config
from fedloom.core.layout import all_finite
from fedloom.core.tasks import ClientTask, TaskMemory
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
from fedloom.runs.build import build_site_context
from fedloom.runs.resolve import RunRequest, UserObjects, record_partition_hash, resolve_method
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import TrainOutcome, evaluate_client, train_client
from fedloom.training.trainer import LocalTrainer
from fedloom.utils.storage import read_json, write_json
from fedloom.utils.system import make_private_directory


@dataclass(frozen=True)
class _SiteTrainingSetup:
    """What the sites of one process share: everything but a site's data and client states."""

    request: RunRequest
    context: TrainingContext
    initial: Tensor
    """The initial model of all clients."""
    codec: ModelTensorCodec
    trainer: LocalTrainer


_last: dict[str, _SiteTrainingSetup] = {}


def _make_training_setup(
    config: Config, load_user_objects: Callable[[], UserObjects], spec: SiteDataSpec | None = None
) -> _SiteTrainingSetup:
    """Return the setup of this run. If it is not cached, build it from the data of `load_user_objects`."""
    about = (spec.classes, spec.shape, spec.vocabulary_size, spec.transform) if spec is not None else ()
    key = config.model_dump_json() + repr(about)
    if key not in _last:
        _last.clear()
        # Nothing is filled in: the site trains by the settings that its operator agreed to.
        request = RunRequest(record_partition_hash(config), resolve_method(config), load_user_objects())
        resolved, context = build_site_context(request)
        initial = context.layout.read(context.model)  # before the trainer changes the module
        codec = ModelTensorCodec(context.layout, context.client.personal_columns)
        _last[key] = _SiteTrainingSetup(
            resolved, context, initial, codec, LocalTrainer(context, torch.device(resolved.config.device))
        )
    return _last[key]


Handler = Callable[["SiteHandler", SiteMessage], SiteMessage]

HANDLERS: dict[str, Handler] = {}
"""Handlers by the kind of request."""
HELLO_HANDLERS: list[Callable[["SiteHandler"], Mapping[str, Any]]] = []
"""Functions that add entries to a site's reply to `hello`."""
EXTENSIONS: tuple[str, ...] = ("fedloom.flower.secure_recombination.site",)
"""Modules that register more handlers, imported when a site starts."""


def register_message_handler(kind: str) -> Callable[[Handler], Handler]:
    """Decorate a function that handles requests of this kind."""

    def note(handler: Handler) -> Handler:
        HANDLERS[kind] = handler
        return handler

    return note


def register_hello_handler(
    handler: Callable[["SiteHandler"], Mapping[str, Any]],
) -> Callable[["SiteHandler"], Mapping[str, Any]]:
    """Add the result of a function to every site's reply to `hello`."""
    HELLO_HANDLERS.append(handler)
    return handler


@dataclass(frozen=True)
class SiteHandlerResult:
    """The result of one client's training, before anything is sent or stored."""

    memory: TaskMemory
    outcome: TrainOutcome


class SiteHandler:
    """One site of a run. `folder` belongs to it alone and holds its client states."""

    def __init__(
        self, run_config: Mapping[str, Any], node_config: Mapping[str, Any], app_folder: Path, folder: Path
    ) -> None:
        for name in EXTENSIONS:
            importlib.import_module(name)
        self.run_config, self.node_config, self.app_folder, self.folder = (
            dict(run_config),
            dict(node_config),
            app_folder,
            folder,
        )
        make_private_directory(folder)
        self.name = _name_of(folder)
        """A random name, stored in the folder. It identifies the site whatever its address."""
        self.memory: dict[str, Any] = {}
        """Values that handlers keep between requests; they are gone when this process ends."""
        self.client_ids = site_data_clients(self.node_config)
        """The clients of this site; empty until the server assigns one."""
        torch.set_num_threads(int(self.node_config.get("threads", 1)))
        self._assigned_by_run = ""
        self._built = False

    def assign_client_id(self, request: SiteMessage) -> None:
        """Become the client that this run's server assigns; only for nodes whose configuration names no client."""
        run, client_id = request.header["run"], request.header.get("assigned")
        if type(client_id) is int and client_id >= 0:
            write_json(self._client_id_file(run), {"client_id": client_id})
            self._set_client_id(client_id, run)
        elif run != self._assigned_by_run:
            self.client_ids = ()

    def restore_client_id(self, request: SiteMessage) -> None:
        """Become the client that this run's server assigned before this process started."""
        run = request.header["run"]
        if (
            not site_data_clients(self.node_config)
            and run != self._assigned_by_run
            and self._client_id_file(run).exists()
        ):
            self._set_client_id(int(read_json(self._client_id_file(run))["client_id"]), run)

    def _set_client_id(self, client_id: int, run: str) -> None:
        self._built &= self.client_ids == (client_id,)
        self.client_ids, self._assigned_by_run = (client_id,), run

    def _client_id_file(self, run: str) -> Path:
        return self.folder / run / "number.json"

    def build(self) -> None:
        """Read the data and build the network, once. Refuse settings that the site's operator did not agree to."""
        if self._built:
            return
        site_module = import_site_data_file(self.app_folder)
        spec = read_site_data_spec(site_module)
        config = resolve_app_config(self.run_config, self.app_folder, spec, self.node_config)
        self.settings = agreement_settings(config)
        check_agreement(self.node_config, self.folder, self.settings)  # before any data are read
        config = replace_config(config, engine="sequential", device=str(self.node_config.get("device", "cpu")))
        if spec is None:
            setup = _make_training_setup(config, UserObjects)
            federated_data: FederatedDataset = restrict_site_data(setup.context.data, self.client_ids)
        else:
            if len(self.client_ids) != 1 or config.clients is None:
                raise InputError(
                    "a site with its own data must hold exactly one client, and the run must set `clients`."
                )
            site_data = load_client_site_data(site_module, self.node_config, self.client_ids[0])
            federated_data = mine = make_site_dataset(spec, config.clients, self.client_ids[0], site_data)
            setup = _make_training_setup(config, lambda: UserObjects(data=mine), spec)
        self.config, self.method = setup.request.config, setup.request.method
        self.context = replace(setup.context, data=federated_data)
        self.initial, self.codec, self.trainer = setup.initial, setup.codec, setup.trainer
        self.device, self.layout = setup.trainer.device, setup.trainer.layout
        self._built = True

    def handle(self, request: SiteMessage) -> SiteMessage:
        """Return the reply to a request."""
        try:
            handler = HANDLERS.get(request.kind)
            if handler is None:
                raise MessageRejected(f"this site cannot handle a request of the kind {request.kind!r}")
            _check_address(request)
            self.restore_client_id(request)
            return handler(self, request)
        except (Exception, SystemExit) as error:  # no error in a client's code may stop the site
            reason = str(error) if isinstance(error, FedloomError) else describe_error(error)
            return make_failure_message(request, reason, permanent=isinstance(error, MessageRejectedPermanently))

    def state_store(self, request: SiteMessage) -> SiteStateStore:
        """Return the store for the states of the requested client in this run."""
        return SiteStateStore(self.folder / request.header["run"] / f"client-{request.header['client_id']}")

    def train(self, request: SiteMessage) -> SiteHandlerResult:
        """Train the requested client from the received model."""
        self.build()
        client_id, layout = self._client_id(request), self.layout
        held, min_examples = self.context.data.num_examples(client_id), self.context.client.min_examples
        if held < min_examples:
            what = f"it has {held} samples, and {min_examples} are needed"
            raise MessageRejected(f"what {self.config.method} sends beside a model would reveal its samples: {what}")
        received = self._received(request)
        extras = {
            name.removeprefix("extra/"): self._tensor(request, name)
            for name in request.arrays
            if name.startswith("extra/")
        }
        client_state, first_visit = self._client_state(request)
        uploads = {
            name: torch.zeros(shape, dtype=layout.dtype, device=self.device)
            for name, shape in self.context.client.upload_shapes.items()
        }
        task = ClientTask(client_id, received, extras=extras, round=request.header["round"])
        memory = TaskMemory(layout.empty(self.device), client_state, uploads, first_visit)
        outcome = train_client(self.trainer, self.context, task, memory)
        for name, tensor in client_state.items():
            if not all_finite(tensor):
                raise FedloomError(f"the {name.removeprefix('@')} that it keeps is not finite")
        return SiteHandlerResult(memory, outcome)

    def stage_client_state(self, request: SiteMessage, result: SiteHandlerResult) -> None:
        """Write the new client state; it takes effect once the server says that it accepted the update."""
        if client_state := result.memory.client_state:
            self.state_store(request).stage(request.header["nonce"], client_state)

    def evaluate(self, request: SiteMessage) -> float | None:
        """Return the accuracy of the requested client's personal model; its state does not change."""
        self.build()
        client_id, received = self._client_id(request), self._received(request)
        client_state, first_visit = self._client_state(request)
        if self.context.data.test is None:
            return None
        task = ClientTask(client_id, received, round=request.header["round"])
        memory = TaskMemory(self.layout.empty(self.device), client_state, {}, first_visit)
        return evaluate_client(self.trainer, self.context, task, memory)

    def _client_id(self, request: SiteMessage) -> int:
        client_id: int = request.header["client_id"]
        if client_id not in self.client_ids:
            raise MessageRejected(f"client {client_id} is not at this site")
        return client_id

    def _received(self, request: SiteMessage) -> Tensor:
        """Return the received model, with the initial values in the columns that are never sent."""
        if "model" not in request.arrays:
            raise MessageRejected("the request contains no model")
        return self.codec.decode(request.arrays["model"], self.initial.clone(), "the model").to(self.device)

    def _tensor(self, request: SiteMessage, name: str) -> Tensor:
        array = request.arrays[name]
        return decode_tensor(array, getattr(torch, array.dtype), array.shape, name).to(self.device)

    def _client_state(self, request: SiteMessage) -> tuple[dict[str, Tensor], bool]:
        """Return a copy of the client state, and whether this is the client's first visit."""
        shapes, dtype = self.context.client.state_shapes, self.layout.dtype
        if not shapes:
            return {}, True
        accepted, state_store = request.header.get("accepted"), self.state_store(request)
        if accepted is None:
            state_store.forget()
            return {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, shape in shapes.items()}, True
        state = state_store.get(accepted)
        if state is None:
            raise SiteStateLost("its client state is missing; it will start without one")
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise SiteStateLost("its client state has another shape; it will start without one")
        return {name: tensor.to(self.device) for name, tensor in state.items()}, False


@register_message_handler("hello")
def _handle_hello(site: SiteHandler, request: SiteMessage) -> SiteMessage:
    """Return who this site is, and how many samples its clients have and train on."""
    if not site_data_clients(site.node_config):
        site.assign_client_id(request)
    if not site.client_ids:
        return request.reply("hello", {"site": site.name, "clients": {}})
    site.build()
    config, layout = site.context.config, site.layout
    counts = {}
    for client_id in site.client_ids:
        total = site.context.data.num_examples(client_id)
        held = min(int(config.validation * total + 0.5), max(0, total - 1))
        counts[str(client_id)] = [total, total - held]
    about = {
        "site": site.name,
        "clients": counts,
        "layout": layout.fingerprint(),
        "versions": {"fedloom": __version__, "torch": torch.__version__},
    }
    for handler in HELLO_HANDLERS:
        about.update(handler(site))
    return request.reply("hello", about)


@register_message_handler("train")
def handle_train_message(site: SiteHandler, request: SiteMessage) -> SiteMessage:
    """Train, stage the client state until the server accepts the update, and send the rest."""
    try:
        result = site.train(request)
    except SiteStateLost as error:
        return request.reply("failed", {"reason": str(error), "state_lost": True})
    site.stage_client_state(request, result)
    uploads = {f"upload/{name}": encode_tensor(tensor) for name, tensor in result.memory.uploads.items()}
    arrays = {"model": site.codec.encode(result.memory.row), **uploads}
    return request.reply("trained", asdict(result.outcome), arrays)


@register_message_handler("evaluate")
def _handle_evaluate_message(site: SiteHandler, request: SiteMessage) -> SiteMessage:
    """Return the accuracy of the client's personal model."""
    return request.reply("evaluated", {"accuracy": site.evaluate(request)})


def _name_of(folder: Path) -> str:
    path = folder / "site.json"
    if not path.exists():
        write_json(path, {"site": secrets.token_hex(16)})
    return str(read_json(path)["site"])


def _check_address(request: SiteMessage) -> None:
    """Validate the address of a request: it comes from outside, and names folders and random streams."""
    header = request.header
    fits = {
        "run": isinstance(header.get("run"), str) and re.fullmatch(r"[0-9a-f]{32}", header["run"]),
        "nonce": isinstance(header.get("nonce"), str) and re.fullmatch(r"[0-9a-f]{32}", header["nonce"]),
        "round": type(header.get("round")) is int and 0 <= header["round"] < 1 << 32,
        "client_id": type(header.get("client_id")) is int and -1 <= header["client_id"] < 1 << 32,
    }
    for name, right in fits.items():
        if not right:
            raise MessageRejected(f"the request has an invalid {name}: {header.get(name)!r}")
