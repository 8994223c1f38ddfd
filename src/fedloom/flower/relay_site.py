"""A site's answers in the sealed exchange of layers (sealed_site.py).

What a client trained waits in the memory of the site's process until its round is over, and is never written down. The
node's configuration says who the site is and whom it believes:

    key              its private key, the one its SuperNode has
    roster           a file with the public keys of all sites, by name
    models-key       a secret that all sites have and the server has not; layers are then sealed with it, and the server
                     gets no layer, only means. It is for one run: what would be means of two could be subtracted
    agreed           the settings that the site's operator agreed to (agreement.py); it serves no others
    fewest-sites     how many sites must take part, itself among them (3)
    exchange-draws   `private`: which layers go where is drawn where nobody can know it; `seeded`: it follows from the
                     run's seed, as in the other engines, and then the server can work it out
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedloom.errors import FedloomError, InputError
from fedloom.exchange import FEWEST_TO_EXCHANGE, LayerExchange
from fedloom.flower.agreement import canonical
from fedloom.flower.averaging import Hidden
from fedloom.flower.data import clients_of
from fedloom.flower.diary import NEVER, OVER, Diary, Stamp
from fedloom.flower.identity import Identity, SiteKeys
from fedloom.flower.notes import Note
from fedloom.flower.parcel import Block, Parcel, Refused, RefusedForGood
from fedloom.flower.sealed import KEY, ModelsKey, Refusal, Terms, frame
from fedloom.flower.sealed_site import Draws, SealedSite, unpredictable
from fedloom.flower.site import Site, StateLost, Trained, greets, handles
from fedloom.flower.site import score as plain_score
from fedloom.flower.site import train as plain_train
from fedloom.flower.stages import serve
from fedloom.flower.starting import inventory_of, opened, plan_of, start_of
from fedloom.flower.tensors import pick, put, travelling
from fedloom.methods.recombination import Draw, purpose
from fedloom.rows import Layout, Mean
from fedloom.streams import Streams

MOST_TIMES = 3
"""How often a client trains for one round's exchange, without a models key. A server that was restarted plays its last
round again; one that only says so gets as many recombinations of the same layers, and no more."""
STAGES = ("hello", "offer", "answer", "lock", "commit", "release", "mean")


@greets
def introduce(site: Site) -> dict[str, Any]:
    """By what name other sites know this one; whether it is only simulated and so has nothing to hide."""
    simulated = "partition-id" in site.node and "key" not in site.node
    try:
        identity, roster = _credentials(site.node)
        about: dict[str, Any] = {"exchanges_as": roster.name_of(identity), "simulated": False}
        models_key = _models_key(site.node)
        if models_key is not None:
            about |= {"seals_for": _known_as(site, models_key).hex(), "open_rounds": plan_of(site, 0) is None}
        return about
    except InputError as error:  # without a models key it can still take part in everything else
        return {"exchanges_as": None, "simulated": simulated, "exchange_trouble": str(error)[:300]}


@handles("train")
def train_openly(site: Site, question: Parcel) -> Parcel:
    """Ordinary training. Where a run's clients exchange layers, a site that can sends its model in no other way.

    A site that has a models key takes part in nothing else.
    """
    if "models-key" in site.node:
        raise Refused("it has a models key, and then its models leave it through the secure exchange of layers alone")
    if "key" in site.node and "roster" in site.node and _plan(site, question) is not None:
        raise Refused("its models leave it through the secure exchange of layers alone")
    return plain_train(site, question)


@handles("score")
def score_openly(site: Site, question: Parcel) -> Parcel:
    """How the client's own model does. A site with a models key does not tell: the server chooses the model."""
    if "models-key" in site.node:
        raise Refused("it has a models key, and then does not say how models that the server chooses do on its data")
    return plain_score(site, question)


@handles("mix/train")
def train(site: Site, question: Parcel) -> Parcel:
    """Train, and open the exchange instead of sending the model.

    What is exchanged, and how, the site knows from the run itself: the server only says who is in which slot.
    """
    identity, roster = _credentials(site.node)
    models_key = _models_key(site.node)
    plan, header = _plan(site, question), question.header
    if plan is None:
        raise Refused(f"in round {header['round'] + 1} of this run no layers are exchanged")
    columns = travelling(plan, site.travel)
    opener = _opener(site, question, models_key)
    if models_key is not None:  # before anything is opened
        Diary(site.folder, models_key.public).refuse_other_runs(_served(site, question, models_key))
    inventory = inventory_of(question, models_key, opener)
    start = start_of(site, question, inventory) if models_key is not None else ""
    stamp = inventory.newest if inventory is not None else NEVER
    if models_key is not None and (again := _said_before(site, question, models_key, start, stamp)) is not None:
        return again
    times = site.memory.setdefault("exchanged", Counter())
    if models_key is None and times[_key(question)] == MOST_TIMES:
        raise Refused(f"it has trained for the exchange of round {header['round'] + 1} {MOST_TIMES} times already")
    try:
        done = site.train(opened(site, question, models_key, inventory, columns))
    except StateLost as error:
        return question.reply("failed", {"reason": str(error), "state_lost": True})
    if not done.samples:
        return question.reply("mix/idle", _about(done, models_key))
    if done.uploads:
        raise Refused("what travels beside a model would tell what was trained")
    if not site.layout.is_finite(done.row):
        raise FedloomError("its model is not finite")  # nobody else could refuse it once it is sealed
    row, slot = done.row.cpu(), _slot(question)
    layers = [pick(row, parts) for parts in columns]
    listed = bytes(question.blocks["inventory"].data) if inventory is not None else b""
    terms = Terms(tuple(map(len, layers)), plan.send_probability, plan.mixed, opener, listed)
    draws, fewest, hidden = _draws(site, header["round"], slot), _fewest(site.node), None
    if models_key is not None:
        hidden = Hidden(models_key, partial(_mean, site.layout, columns), terms, site.config.cohort, inventory)
    sealed = SealedSite(identity, roster, header["run"], header["round"], slot, layers, terms, draws, fewest, hidden)
    times[_key(question)] += 1
    ours = site.memory.setdefault("exchanges", {})
    for old in [key for key in ours if key[:2] != (header["run"], header["round"])]:
        del ours[old]
    ours[_key(question)] = _Begun(sealed, done, Parcel(question.kind, header), _fingerprint(question), start, stamp)
    return _answered(question, "hello", sealed, _about(done, models_key))


@dataclass
class _Begun:
    """An exchange that a client has begun."""

    sealed: SealedSite
    done: Trained
    question: Parcel
    """What it was asked, without the model: what it keeps is known by that."""
    asked: str
    """A hash of the whole question."""
    start: str
    """Which model it was asked to train."""
    stamp: Stamp
    """How old the inventory is that this is from."""
    noted: bool = False
    """Whether it is written down that this client has committed itself, in its diary where there is a models key."""


def _said_before(site: Site, question: Parcel, models_key: ModelsKey, start: str, stamp: Stamp) -> Parcel | None:
    """The same answer as before, where this client has committed itself in this round; else None, or a refusal.

    A server that begins its round anew, after its restart, gets what it had.
    """
    diary, round, which = Diary(site.folder, models_key.public), question.header["round"], _who(site, question)
    run = _served(site, question, models_key)
    if round >= site.config.rounds:
        raise Refused(f"this run has {site.config.rounds} rounds, and no round {round + 1}")
    if not diary.is_over(run, which, round):
        diary.refuse(run, which, round, start, stamp)
        return None
    begun = site.memory.get("exchanges", {}).get(_key(question))
    if begun is None or not begun.noted or begun.asked != _fingerprint(question):
        raise RefusedForGood(OVER.format(round + 1))
    site.stage(question, begun.done)
    return _answered(question, "hello", begun.sealed, _about(begun.done, models_key))


def _served(site: Site, question: Parcel, models_key: ModelsKey) -> str:
    """The run that the key serves, and with which settings: with others it is another one."""
    return f"{question.header['run']} {_known_as(site, models_key).hex()}"


def _who(site: Site, question: Parcel) -> str:
    """Whose data are trained on; a site that the server gives a number has the same whatever the number."""
    return str(question.header["client"]) if clients_of(site.node) else "all"


def _about(done: Trained, models_key: ModelsKey | None) -> dict[str, Any]:
    """How a client has trained. Where there is a models key not how well: it has not committed itself yet, and could be
    asked about many models."""
    return {"samples": done.samples, "loss": done.loss if models_key is None else math.nan, "steps": done.steps}


def _fingerprint(question: Parcel) -> str:
    """Of what is to be trained, and from what."""
    header = {name: value for name, value in question.header.items() if name != "nonce"}
    content = [part for name, block in sorted(question.blocks.items()) for part in (name.encode(), bytes(block.data))]
    return hashlib.sha256(frame(json.dumps(header, sort_keys=True), *content)).hexdigest()


def _stage(stage: str, site: Site, question: Parcel) -> Parcel:
    begun = site.memory.get("exchanges", {}).get(_key(question))
    if begun is None or begun.sealed.slot != _slot(question):
        raise Refused(f"it has no model of round {question.header['round'] + 1} to exchange layers of")
    models_key = _models_key(site.node)
    if models_key is not None and stage in ("release", "mean") and not begun.noted:
        raise Refused("it has not written down that it has committed itself")
    if stage != "commit" or begun.noted:
        return _answered(question, stage, begun.sealed, {})
    if models_key is not None:
        diary = Diary(site.folder, models_key.public)
        entry = _served(site, question, models_key), _who(site, question), question.header["round"]
        diary.refuse(*entry, begun.start, begun.stamp)
    answer = _answered(question, stage, begun.sealed, {})
    if begun.sealed.committed:
        if models_key is not None:
            diary.commit(*entry, begun.start, begun.stamp)
        site.stage(begun.question, begun.done)  # not before: what comes to nothing changes nothing here
        begun.noted = True
    return answer


for _name in STAGES:
    handles(f"mix/{_name}")(partial(_stage, _name))


def _answered(question: Parcel, stage: str, sealed: SealedSite, about: Mapping[str, Any]) -> Parcel:
    numbers = {name: question.header[name] for name in ("attempt", "exchange") if name in question.header}
    asked = Note(numbers, {name: bytes(block.data) for name, block in question.blocks.items() if stage != "hello"})
    try:
        answer = serve(sealed, stage, asked)
    except Refusal as error:
        for_good = {"for_good": True} if _is_for_good(stage, sealed) else {}
        return question.reply("mix/refused", {"reason": str(error)[:300], **for_good})
    blocks = {name: Block.raw(part) for name, part in answer.parts.items()}
    return question.reply(f"mix/{stage}", {**about, **answer.header}, blocks)


def _is_for_good(stage: str, sealed: SealedSite) -> bool:
    """Whether a refusal ends this round for the client.

    A server that plays the round again begins with the first attempt. Who has committed itself in that one says again
    what it said; in another, or with others, it never will.
    """
    return sealed.committed and not (stage == "hello" and sealed.attempt == 0)


def _mean(layout: Layout, columns: list[list[slice]], number: int, layers: Sequence[bytes]) -> bytes:
    """The mean of one layer over models, by the arithmetic of a server that has them."""
    mean, row = Mean(layout), torch.zeros_like(layout.empty())
    for layer in layers:
        put(row, columns[number], layer)
        mean.add(row)
    mean.into(row)
    return pick(row, columns[number])


def _plan(site: Site, question: Parcel) -> LayerExchange | None:
    """What this run's clients exchange in this round."""
    return plan_of(site, question.header["round"])


def _key(question: Parcel) -> tuple[str, int, int]:
    """Whose exchange this is, whatever slot it is told."""
    return question.header["run"], question.header["round"], question.header["client"]


def _fewest(node: Mapping[str, Any]) -> int:
    given = str(node.get("fewest-sites", FEWEST_TO_EXCHANGE))
    if not re.fullmatch(r"[0-9]{1,6}", given) or not int(given):
        raise InputError(f"fewest-sites in a node's configuration is a whole number from 1 on, not {given!r}.")
    return int(given)


def _credentials(node: Mapping[str, Any]) -> tuple[Identity, SiteKeys]:
    for name, what in (("key", "this site's private key"), ("roster", "the file with all sites' public keys")):
        if name not in node:
            raise InputError(f"the secure exchange of layers needs {what}: {name}=... in the node's configuration.")
    return Identity.read(Path(str(node["key"]))), SiteKeys.read(Path(str(node["roster"])))


def _draws(site: Site, round: int, slot: int) -> Draws:
    wanted = site.node.get("exchange-draws", "private")
    if wanted == "private":
        return unpredictable
    if wanted != "seeded":
        raise InputError(f"exchange-draws in a node's configuration is private or seeded, not {wanted!r}.")
    streams: Streams = site.shop.workshop.streams

    def draws(attempt: int, number: int) -> Draw:
        return streams.numpy(purpose(attempt, number), round, slot)

    return draws


def _slot(question: Parcel) -> int:
    slot = question.header.get("slot")
    if type(slot) is not int or not 0 <= slot < 1 << 16:
        raise Refused(f"a question has the slot {slot!r}")
    return slot


def _opener(site: Site, question: Parcel, models_key: ModelsKey | None) -> bytes:
    """What to seal layers for. A site that has a models key seals with that and for nothing else."""
    block = question.blocks.get("opener")
    if block is None or block.nbytes != KEY:
        raise Refused("there is no key in the question to seal layers for")
    if models_key is not None and bytes(block.data) != _known_as(site, models_key):
        raise Refused("it seals its layers for the sites' models key, and was asked to do so for another")
    return bytes(block.data)


def _known_as(site: Site, models_key: ModelsKey) -> bytes:
    """By what name the models key is known in this run, as this site was told the run.

    The run's settings come from the server. If it told sites different ones, such as a learning rate of nearly nothing
    for all but one, it could work out that one's model from the mean. So sites only exchange on the same terms.
    """
    site.build()
    return models_key.name(canonical(site.told))


def _models_key(node: Mapping[str, Any]) -> ModelsKey | None:
    if "models-key" not in node:
        return None
    if "folder" not in node:
        raise InputError("a site with a models key needs a folder that lasts: folder=... in the node's configuration.")
    return ModelsKey.read(Path(str(node["models-key"])))
