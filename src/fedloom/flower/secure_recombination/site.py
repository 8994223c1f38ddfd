"""A site's handlers in the secure exchange of layers.

Their stages are those of participant.py.

A client's trained model waits in the memory of the site process until its round is over, and is never written to disk.
The node configuration says who the site is and whom it trusts:

    key              its private key, the one of its SuperNode
    roster           a file with the public keys of all sites, by name
    agreed           the settings that the site's operator agreed to (trust/agreement.py); it refuses all others
    fewest-sites     how many sites must take part, including this one (3)
    exchange-draws   `private`: nobody can know which layers go where; `seeded`: the choices follow from the run's seed,
                     as in the other engines, and the server can compute them
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.rng import RngStreams
from fedloom.errors import FedloomError, InputError
from fedloom.flower.message import MessageArray, MessageRejected, MessageRejectedPermanently, SiteMessage
from fedloom.flower.secure_recombination.crypto import KEY, CryptoRejected, CryptoTerms
from fedloom.flower.secure_recombination.layers import make_layer_exchange
from fedloom.flower.secure_recombination.participant import (
    ExchangeParticipant,
    RandomDraws,
    participant_random_source,
    run_participant_stage,
)
from fedloom.flower.secure_recombination.relay import RelayMessage
from fedloom.flower.site.handlers import (
    SiteHandler,
    SiteHandlerResult,
    register_hello_handler,
    register_message_handler,
)
from fedloom.flower.site.handlers import handle_train_message as plain_train
from fedloom.flower.site.state import SiteStateLost
from fedloom.flower.tensors import encode_tensor_columns, split_tensors_by_layer
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import LayerExchange, LayerExchangeRng, layer_exchange_stream_name

FEWEST_SITES = 3
"""If only two sites exchange layers, each knows which are the other's."""
MOST_TIMES = 3
"""How often a client trains for one round's exchange. A restarted server repeats its last round. A server that only
claims a restart gets this many recombinations of the same layers and no more."""
STAGES = ("hello", "offer", "answer", "lock", "commit", "release")


@register_hello_handler
def _announce_participant(site: SiteHandler) -> dict[str, Any]:
    """Return the name by which other sites know this one, and whether it is simulated and has nothing to hide."""
    simulated = "partition-id" in site.node_config and "key" not in site.node_config
    try:
        identity, site_keys = _credentials(site.node_config)
        return {"exchanges_as": site_keys.name_of(identity), "simulated": False}
    except InputError as error:  # it can still take part in everything else
        return {"exchanges_as": None, "simulated": simulated, "exchange_trouble": str(error)[:300]}


@register_message_handler("train")
def _train_without_exchange(site: SiteHandler, request: SiteMessage) -> SiteMessage:
    """Train without an exchange. A site that can exchange layers refuses if the run's clients do so in this round."""
    if "key" in site.node_config and "roster" in site.node_config and _plan(site, request) is not None:
        raise MessageRejected("it sends its models only through the secure exchange of layers")
    return plain_train(site, request)


@register_message_handler("mix/train")
def _train_for_exchange(site: SiteHandler, request: SiteMessage) -> SiteMessage:
    """Train, and open the exchange instead of sending the model.

    The site derives what to exchange from the run's settings. The server only says who has which model index.
    """
    identity, site_keys = _credentials(site.node_config)
    exchange, header = _plan(site, request), request.header
    if exchange is None:
        raise MessageRejected(f"in round {header['round'] + 1} of this run no layers are exchanged")
    opener = _opener(request)
    times = site.memory.setdefault("exchanged", Counter())
    if times[_key(request)] == MOST_TIMES:
        raise MessageRejectedPermanently(
            f"it has trained for the exchange of round {header['round'] + 1} {MOST_TIMES} times already"
        )
    try:
        result = site.train(request)
    except SiteStateLost as error:
        return request.reply("failed", {"reason": str(error), "state_lost": True})
    about = asdict(result.outcome)
    if not result.outcome.num_examples:
        return request.reply("mix/idle", about)
    if result.memory.uploads:
        raise MessageRejected("what it sends beside its model would reveal what was trained")
    if not site.layout.is_finite(result.memory.row):
        raise FedloomError("its model is not finite")  # nobody else can check it once it is sealed
    row, model_index = result.memory.row.cpu(), _model_index(request)
    layers = [encode_tensor_columns(row, parts) for parts in split_tensors_by_layer(exchange.layers, site.codec)]
    terms = CryptoTerms(tuple(map(len, layers)), exchange.send_probability, exchange.mixed, opener)
    random_draws, min_sites = _draws(site, header["round"], model_index), _min_sites(site.node_config)
    participant = ExchangeParticipant(
        identity, site_keys, header["run"], header["round"], model_index, layers, terms, random_draws, min_sites
    )
    times[_key(request)] += 1
    ours = site.memory.setdefault("exchanges", {})
    for old in [key for key in ours if key[:2] != (header["run"], header["round"])]:
        del ours[old]
    ours[_key(request)] = _Begun(participant, result, SiteMessage(request.kind, header))
    return _answered(request, "hello", participant, about)


@dataclass
class _Begun:
    """A client's exchange in progress."""

    participant: ExchangeParticipant
    result: SiteHandlerResult
    request: SiteMessage
    """The request without the model; its nonce names the client state."""
    staged: bool = False
    """Whether the new client state is staged."""


def _stage(stage: str, site: SiteHandler, request: SiteMessage) -> SiteMessage:
    begun = site.memory.get("exchanges", {}).get(_key(request))
    if begun is None or begun.participant.model_index != _model_index(request):
        raise MessageRejected(f"it has no model of round {request.header['round'] + 1} to exchange layers of")
    answer = _answered(request, stage, begun.participant, {})
    if begun.participant.committed and not begun.staged:
        site.stage_client_state(begun.request, begun.result)  # not before: a failed exchange must change nothing
        begun.staged = True
    return answer


for _name in STAGES:
    register_message_handler(f"mix/{_name}")(partial(_stage, _name))


def _answered(
    request: SiteMessage, stage: str, participant: ExchangeParticipant, about: Mapping[str, Any]
) -> SiteMessage:
    numbers = {name: request.header[name] for name in ("attempt", "exchange") if name in request.header}
    asked = RelayMessage(
        numbers, {name: bytes(array.data) for name, array in request.arrays.items() if stage != "hello"}
    )
    try:
        answer = run_participant_stage(participant, stage, asked)
    except CryptoRejected as error:
        return request.reply("mix/refused", {"reason": str(error)[:300]})
    return request.reply(f"mix/{stage}", about, {name: MessageArray.raw(part) for name, part in answer.parts.items()})


def _plan(site: SiteHandler, request: SiteMessage) -> LayerExchange | None:
    """Return what clients exchange in this round, by the site's own copy of the run's settings."""
    site.build()
    return make_layer_exchange(site.method, site.layout, request.header["round"])


def _key(request: SiteMessage) -> tuple[str, int, int]:
    """Return whose exchange this is, whatever model index the server sends."""
    return request.header["run"], request.header["round"], request.header["client_id"]


def _min_sites(node_config: Mapping[str, Any]) -> int:
    given = str(node_config.get("fewest-sites", FEWEST_SITES))
    if not re.fullmatch(r"[0-9]{1,6}", given) or not int(given):
        raise InputError(f"fewest-sites in the node configuration must be an integer of at least 1, not {given!r}.")
    return int(given)


def _credentials(node_config: Mapping[str, Any]) -> tuple[Identity, SiteKeys]:
    for name, what in (("key", "this site's private key"), ("roster", "the file with all sites' public keys")):
        if name not in node_config:
            raise InputError(f"the secure exchange of layers needs {what}: set {name}=... in the node configuration.")
    return Identity.read(Path(str(node_config["key"]))), SiteKeys.read(Path(str(node_config["roster"])))


def _draws(site: SiteHandler, round: int, model_index: int) -> RandomDraws:
    wanted = site.node_config.get("exchange-draws", "private")
    if wanted == "private":
        return participant_random_source
    if wanted != "seeded":
        raise InputError(f"exchange-draws in the node configuration must be private or seeded, not {wanted!r}.")
    rng_streams: RngStreams = site.context.rng_streams

    def draws(attempt: int, number: int) -> LayerExchangeRng:
        return rng_streams.numpy(layer_exchange_stream_name(attempt, number), round, model_index)

    return draws


def _model_index(request: SiteMessage) -> int:
    model_index = request.header.get("model_index")
    if type(model_index) is not int or not 0 <= model_index < 1 << 16:
        raise MessageRejected(f"the request has an invalid model_index: {model_index!r}")
    return model_index


def _opener(request: SiteMessage) -> bytes:
    """Return the server's key, for which layers are sealed."""
    array = request.arrays.get("opener")
    if array is None or array.nbytes != KEY:
        raise MessageRejected("the request contains no key to seal layers for")
    return bytes(array.data)
