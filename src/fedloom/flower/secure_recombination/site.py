"""A site's answers in the sealed exchange of layers, whose stages are those of sealed_site.py.

What a client trained waits in the memory of the site's process until its round is over, and is never written down. The
node's configuration says who the site is and whom it believes:

    key              its private key, the one its SuperNode has
    roster           a file with the public keys of all sites, by name
    agreed           the settings that the site's operator agreed to (agreement.py); it serves no others
    fewest-sites     how many sites must take part, itself among them (3)
    exchange-draws   `private`: which layers go where is drawn where nobody can know it; `seeded`: it follows from the
                     run's seed, as in the other engines, and then the server can work it out
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.rng import RngStreams
from fedloom.errors import FedloomError, InputError
from fedloom.flower.message import MessageArray, MessageRejected, MessageRejectedPermanently, SiteMessage
from fedloom.flower.secure_recombination.crypto import KEY, EncryptionTerms, ExchangeRejected
from fedloom.flower.secure_recombination.layers import exchange_of
from fedloom.flower.secure_recombination.messages import RelayMessage, relay_message_parts
from fedloom.flower.secure_recombination.participant import Draws, ExchangeParticipant, system_random_source
from fedloom.flower.site.handlers import SiteHandler, SiteTrainResult, register_hello_handler, register_message_handler
from fedloom.flower.site.handlers import handle_train_message as plain_train
from fedloom.flower.site.state import SiteStateLost
from fedloom.flower.tensors import encode_tensor_columns, tensor_columns_by_layer
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import LayerExchange, LayerExchangeRng, layer_exchange_stream_name

FEWEST_SITES = 3
"""Between two sites that exchange layers each knows which are the other's."""
MOST_TIMES = 3
"""How often a client trains for one round's exchange. A server that was restarted plays its last round again; one that
only says so gets as many recombinations of the same layers, and no more."""
STAGES = ("hello", "offer", "answer", "lock", "commit", "release")


@register_hello_handler
def _announce_participant(site: SiteHandler) -> dict[str, Any]:
    """By what name other sites know this one; whether it is only simulated and so has nothing to hide."""
    simulated = "partition-id" in site.node and "key" not in site.node
    try:
        identity, roster = _credentials(site.node)
        return {"exchanges_as": roster.name_of(identity), "simulated": False}
    except InputError as error:  # it can still take part in everything else
        return {"exchanges_as": None, "simulated": simulated, "exchange_trouble": str(error)[:300]}


@register_message_handler("train")
def _train_without_exchange(site: SiteHandler, question: SiteMessage) -> SiteMessage:
    """Ordinary training. Where a run's clients exchange layers, a site that can sends its model in no other way."""
    if "key" in site.node and "roster" in site.node and _plan(site, question) is not None:
        raise MessageRejected("its models leave it through the secure exchange of layers alone")
    return plain_train(site, question)


@register_message_handler("mix/train")
def _train_for_exchange(site: SiteHandler, question: SiteMessage) -> SiteMessage:
    """Train, and open the exchange instead of sending the model.

    What is exchanged, and how, the site knows from the run itself: the server only says who is in which slot.
    """
    identity, roster = _credentials(site.node)
    plan, header = _plan(site, question), question.header
    if plan is None:
        raise MessageRejected(f"in round {header['round'] + 1} of this run no layers are exchanged")
    opener = _opener(question)
    times = site.memory.setdefault("exchanged", Counter())
    if times[_key(question)] == MOST_TIMES:
        raise MessageRejectedPermanently(
            f"it has trained for the exchange of round {header['round'] + 1} {MOST_TIMES} times already"
        )
    try:
        done = site.train(question)
    except SiteStateLost as error:
        return question.reply("failed", {"reason": str(error), "state_lost": True})
    about = {"samples": done.samples, "loss": done.loss, "steps": done.steps}
    if not done.samples:
        return question.reply("mix/idle", about)
    if done.uploads:
        raise MessageRejected("what travels beside a model would tell what was trained")
    if not site.layout.is_finite(done.row):
        raise FedloomError("its model is not finite")  # nobody else could refuse it once it is sealed
    row, slot = done.row.cpu(), _slot(question)
    layers = [encode_tensor_columns(row, parts) for parts in tensor_columns_by_layer(plan.layers, site.travel)]
    terms = EncryptionTerms(tuple(map(len, layers)), plan.send_probability, plan.mixed, opener)
    draws, fewest = _draws(site, header["round"], slot), _fewest(site.node)
    sealed = ExchangeParticipant(identity, roster, header["run"], header["round"], slot, layers, terms, draws, fewest)
    times[_key(question)] += 1
    ours = site.memory.setdefault("exchanges", {})
    for old in [key for key in ours if key[:2] != (header["run"], header["round"])]:
        del ours[old]
    ours[_key(question)] = _Begun(sealed, done, SiteMessage(question.kind, header))
    return _answered(question, "hello", sealed, about)


@dataclass
class _Begun:
    """An exchange that a client has begun."""

    sealed: ExchangeParticipant
    done: SiteTrainResult
    question: SiteMessage
    """What it was asked, without the model: what it keeps is known by that."""
    staged: bool = False
    """Whether what the client wants to keep is ready to be kept."""


def _stage(stage: str, site: SiteHandler, question: SiteMessage) -> SiteMessage:
    begun = site.memory.get("exchanges", {}).get(_key(question))
    if begun is None or begun.sealed.slot != _slot(question):
        raise MessageRejected(f"it has no model of round {question.header['round'] + 1} to exchange layers of")
    answer = _answered(question, stage, begun.sealed, {})
    if begun.sealed.committed and not begun.staged:
        site.stage(begun.question, begun.done)  # not before: what comes to nothing changes nothing here
        begun.staged = True
    return answer


for _name in STAGES:
    register_message_handler(f"mix/{_name}")(partial(_stage, _name))


def _answered(question: SiteMessage, stage: str, sealed: ExchangeParticipant, about: Mapping[str, Any]) -> SiteMessage:
    numbers = {name: question.header[name] for name in ("attempt", "exchange") if name in question.header}
    asked = RelayMessage(
        numbers, {name: bytes(block.data) for name, block in question.blocks.items() if stage != "hello"}
    )
    try:
        answer = serve(sealed, stage, asked)
    except ExchangeRejected as error:
        return question.reply("mix/refused", {"reason": str(error)[:300]})
    return question.reply(f"mix/{stage}", about, {name: MessageArray.raw(part) for name, part in answer.parts.items()})


def serve(site: ExchangeParticipant, stage: str, question: RelayMessage) -> RelayMessage:
    """What a site answers to a question of the relay (relay.py)."""
    attempt, exchange = (_number(question, name) for name in ("attempt", "exchange"))
    if stage == "hello":
        hello, board = site.hello(attempt)
        return RelayMessage(parts={"hello": hello, "board": board})
    if stage == "offer":
        hellos = question.by_slot("hello")
        return RelayMessage(
            parts=relay_message_parts("offer", site.offer(attempt, [hellos[slot] for slot in sorted(hellos)]))
        )
    if stage == "answer":
        return RelayMessage(
            parts=relay_message_parts("answer", site.answer(attempt, exchange, question.by_slot("offer")))
        )
    if stage == "lock":
        model, words = site.lock(attempt, exchange, question.by_slot("answer"), question.by_slot("board"))
        return RelayMessage(parts={"model": model, **relay_message_parts("lock", words)})
    if stage == "commit":
        return RelayMessage(parts=relay_message_parts(*site.commit(attempt, exchange, question.by_slot("lock"))))
    if stage == "release":
        return RelayMessage(
            parts=relay_message_parts("key", site.release(attempt, exchange, question.by_slot("commit")))
        )
    raise ExchangeRejected(f"an exchange has no stage {stage!r}.")


def _number(question: RelayMessage, name: str) -> int:
    value = question.header.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ExchangeRejected(f"{name} must be a whole number, not {value!r}.")
    return value


def _plan(site: SiteHandler, question: SiteMessage) -> LayerExchange | None:
    """What clients exchange in this round, by the site's own copy of the run's configuration."""
    site.build()
    return exchange_of(site.config, site.layout, question.header["round"])


def _key(question: SiteMessage) -> tuple[str, int, int]:
    """Whose exchange this is, whatever slot it is told."""
    return question.header["run"], question.header["round"], question.header["client"]


def _fewest(node: Mapping[str, Any]) -> int:
    given = str(node.get("fewest-sites", FEWEST_SITES))
    if not re.fullmatch(r"[0-9]{1,6}", given) or not int(given):
        raise InputError(f"fewest-sites in a node's configuration is a whole number from 1 on, not {given!r}.")
    return int(given)


def _credentials(node: Mapping[str, Any]) -> tuple[Identity, SiteKeys]:
    for name, what in (("key", "this site's private key"), ("roster", "the file with all sites' public keys")):
        if name not in node:
            raise InputError(f"the secure exchange of layers needs {what}: {name}=... in the node's configuration.")
    return Identity.read(Path(str(node["key"]))), SiteKeys.read(Path(str(node["roster"])))


def _draws(site: SiteHandler, round: int, slot: int) -> Draws:
    wanted = site.node.get("exchange-draws", "private")
    if wanted == "private":
        return system_random_source
    if wanted != "seeded":
        raise InputError(f"exchange-draws in a node's configuration is private or seeded, not {wanted!r}.")
    streams: RngStreams = site.shop.workshop.streams

    def draws(attempt: int, number: int) -> LayerExchangeRng:
        return streams.numpy(layer_exchange_stream_name(attempt, number), round, slot)

    return draws


def _slot(question: SiteMessage) -> int:
    slot = question.header.get("slot")
    if type(slot) is not int or not 0 <= slot < 1 << 16:
        raise MessageRejected(f"a question has the slot {slot!r}")
    return slot


def _opener(question: SiteMessage) -> bytes:
    """The server's key, which layers are sealed for."""
    block = question.blocks.get("opener")
    if block is None or block.nbytes != KEY:
        raise MessageRejected("there is no key in the question to seal layers for")
    return bytes(block.data)
