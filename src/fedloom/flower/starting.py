"""Which model a client trains before it exchanges layers.

Without a models key that is the one in the question. With one it is a model that sites have sealed, which it opens, or
the one that the run begins with, which it knows itself: from a model of the server's own making a client might learn
nothing, or nothing but what the server wants to know.

Nobody trains a model twice (diary.py). All begin with the same one, so if their first exchange fails after they have
committed themselves, none of them could go on. So as long as no exchange has succeeded they begin in every round with
another model, drawn for that round from the run's seed.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from fedloom.exchange import LayerExchange
from fedloom.flower.diary import INITIAL
from fedloom.flower.inventory import Entry, Inventory
from fedloom.flower.parcel import Parcel, Refused
from fedloom.flower.sealed import SEAL, ModelsKey, cut
from fedloom.flower.site import Site
from fedloom.flower.tensors import put
from fedloom.methods.base import Server
from fedloom.request import check

MOST_ALIKE = 0.5
"""The largest cosine of weights that count as drawn independently; small tensors are alike by chance."""
MEAN = "mean"
"""What the mean of the first exchange is called, from which those go on who were not there. A server that has two such
exchanges would have two that are nearly the same, and from what is made of them the difference of two companies."""
OPEN_ROUNDS = "with a models key there are no rounds in the open: fedmr.first_stage must be 0"


def start_of(site: Site, question: Parcel, inventory: Inventory | None) -> str:
    """Which model is to be trained, in a word. The initial one may come rounded in one way or another."""
    block, round = question.blocks.get("model"), question.header["round"]
    if block is None:
        return f"{INITIAL} {round}" if round and _can_be_drawn_anew(site) else INITIAL
    entry = _entry(inventory, question)
    if entry.is_mean:  # of which there is one in a run, however often it is sealed
        return MEAN
    return hashlib.sha256(block.data).hexdigest()


def opened(
    site: Site,
    question: Parcel,
    models_key: ModelsKey | None,
    inventory: Inventory | None,
    columns: list[list[slice]],
) -> Parcel:
    """The question with the model to train in the clear."""
    if models_key is None:
        if "model" in question.blocks:
            raise Refused("the model in the question is sealed, and this site has no models key")
        return question
    if "model" in question.blocks:
        row = _unsealed(site, question, models_key, inventory, columns)
    else:
        _check_initial(site, question)
        # Never the one in the question, which may be a little off, and so off as the server chose.
        number = question.header["round"]
        row = site.drawn(number) if number and _can_be_drawn_anew(site) else site.initial
    others = {name: block for name, block in question.blocks.items() if name not in ("model", "inventory")}
    return Parcel(question.kind, question.header, {**others, "row": site.travel.pack(row)})


def inventory_of(question: Parcel, models_key: ModelsKey | None, terms: bytes) -> Inventory | None:
    """The sites' inventory of all models; None where everybody begins."""
    block = question.blocks.get("inventory")
    if models_key is None or "model" not in question.blocks:
        return None
    if block is None:
        raise Refused("there is no inventory in the question")
    found = Inventory.read(bytes(block.data), models_key, question.header["run"], terms.hex())
    if found.newest[0] >= question.header["round"]:
        # Played backwards, rounds would begin with copies: late in a run models may hardly change any more.
        raise Refused(f"round {question.header['round'] + 1} cannot begin with models of round {found.newest[0] + 1}")
    return found


def _entry(inventory: Inventory | None, question: Parcel) -> Entry:
    """What the inventory says of the model in the question."""
    slot = question.header.get("slot")
    entry = inventory.entries.get(slot) if inventory is not None and type(slot) is int else None
    if entry is None:
        raise Refused(f"the inventory has no model of slot {slot!r}")
    return entry


def _unsealed(
    site: Site, question: Parcel, models_key: ModelsKey, inventory: Inventory | None, columns: list[list[slice]]
) -> Tensor:
    """The model of the slot that the client is in, and no other."""
    entry, row = _entry(inventory, question), site.initial.clone()
    width = row.element_size()
    sizes = [SEAL + width * sum(part.stop - part.start for part in parts) for parts in columns]
    layers = cut(bytes(question.blocks["model"].data), sizes, "the model in the question")
    for number, (parts, sealed) in enumerate(zip(columns, layers, strict=True)):
        put(row, parts, entry.open(models_key, sealed, number))
    if not site.layout.is_finite(row):
        raise Refused("the model in the question is not finite")
    return row


def _check_initial(site: Site, question: Parcel) -> None:
    if plan_of(site, 0) is None:
        raise Refused(OPEN_ROUNDS)
    if "row" not in question.blocks:
        raise Refused("there is no model in the question")
    row, floats = site.travel.unpack(question.blocks["row"], site.initial.clone(), "the model"), site.layout.floats
    near = torch.allclose(row[:floats], site.initial[:floats], rtol=1e-3, atol=1e-5)  # machines round differently
    if not near or not torch.equal(row[floats:].view(torch.uint8), site.initial[floats:].view(torch.uint8)):
        raise Refused("the model in the question is neither sealed nor the one that this run begins with")


def _can_be_drawn_anew(site: Site) -> bool:
    """Whether another draw is another model altogether. One from a file is not, nor one of which a part is given."""
    site.build()
    if site.config.init is not None:
        return False
    both = zip(*(site.layout.views(row) for row in (site.initial, site.drawn(1))), strict=True)
    weights = [(first.flatten(), other.flatten()) for first, other in both if first.ndim > 1]
    return bool(weights) and all(_unlike(*pair) for pair in weights)


def _unlike(first: Tensor, other: Tensor) -> bool:
    length = torch.linalg.vector_norm(first) * torch.linalg.vector_norm(other)
    return bool(length > 0) and abs(float(first @ other / length)) < MOST_ALIKE


def plan_of(site: Site, round: int) -> LayerExchange | None:
    """What clients exchange in a round, by the site's own copy of the run's configuration."""
    site.build()
    run = check(site.config)
    owner = run.owner("server")
    assert owner is not None, "every run has a server"
    server: type[Server[Any]] = run.part_class("server")
    return server.layer_exchange(site.layout, run.options[owner.name], round)
