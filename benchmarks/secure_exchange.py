"""What the secure exchange of layers costs, and what a server can still find out: the figures of
docs/secure-recombination.md.

    python benchmarks/secure_exchange.py [--out results/secure-exchange.json]

- `bytes`: of one client in one round, up and down, for models of 55 thousand and 1.7 million parameters: without an
  exchange, with layers passed on as they are (on average), and with sealed layers. Counted, not estimated, but for the
  second.
- `cpu`: seconds of the processor that one site spends on the cryptography of a round (all sites of an exchange in one
  process, divided by their number), and the server.
- `whole`: how many of the models that are handed over are what one client trained, by clients and layers, after one
  exchange; and how many exchanges `mixed` takes.
- `linked`: FedMR on the digits, ten clients of skewed classes. The server compares each layer that it gets with the
  models that it sent out in that round, and takes the nearest for the layer's origin: how often it is right, by round.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config import make_config
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.flower.secure_recombination.crypto import EncryptionTerms, LayerKeyPair
from fedloom.flower.secure_recombination.messages import RelayMessage
from fedloom.flower.secure_recombination.participant import ExchangeParticipant
from fedloom.flower.secure_recombination.relay import Relay
from fedloom.flower.secure_recombination.site import serve
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import (
    MOST,
    exchange_layers_until_mixed,
    exchange_model_layers,
    layers_have_single_owner,
)
from fedloom.models import build_model
from fedloom.runs.build import build_run

RUN = "0" * 32


def layer_sizes(model: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    layout = Layout.of(build_model(model, shape, 10))
    columns = layout.units().values()
    return tuple(4 * sum(part.stop - part.start for part in parts) for parts in columns)


def sealed(clients: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One exchange: bytes of one client, and processor time of one site and of the server."""
    identities = [Identity.new() for _ in range(clients)]
    roster = SiteKeys.parse("".join(one.public_line(f"site-{k}") for k, one in enumerate(identities)))
    key = LayerKeyPair()
    terms = EncryptionTerms(sizes, 0.5, False, key.public)
    layers = [np.random.default_rng(0).normal(size=size // 4).astype(np.float32).tobytes() for size in sizes]
    spent = 0.0

    def ask(stage: str, questions: dict[int, RelayMessage]) -> dict[int, RelayMessage]:
        nonlocal spent
        start = time.process_time()
        answers = {slot: serve(sites[slot], stage, note) for slot, note in questions.items()}
        spent += time.process_time() - start
        return answers

    sites = {
        k: ExchangeParticipant(identity, roster, RUN, 0, k, layers, terms, fewest=2)
        for k, identity in enumerate(identities)
    }
    relay = Relay(ask, RUN, 0, terms, key)
    begin = time.process_time()
    outcome = relay.exchange(ask("hello", {k: RelayMessage({"attempt": 0}) for k in sites}))
    total = time.process_time() - begin
    assert len(outcome.models) == clients
    return {
        "up": outcome.bytes_up // clients,
        "down": outcome.bytes_down // clients,
        "site seconds": round(spent / clients, 4),
        "server seconds": round(total - spent, 4),
    }


def costs() -> list[dict[str, Any]]:
    found = []
    for model, shape in (("mlp", (1, 8, 8)), ("cnn", (1, 28, 28))):
        sizes = layer_sizes(model, shape)
        whole = sum(sizes)
        for clients in (3, 5, 10):
            runs = [sealed(clients, sizes) for _ in range(5)]
            middle = {name: sorted(run[name] for run in runs)[2] for name in runs[0]}
            found.append(
                {
                    "model": model,
                    "parameters": whole // 4,
                    "layers": len(sizes),
                    "clients": clients,
                    "a model": whole,
                    "plain": {"up": whole, "down": whole},
                    # half of the layers go away and as many come back, each up once and down once
                    "open exchange, on average": {"up": 2 * whole, "down": 2 * whole},
                    "sealed": {
                        "up": middle["up"],
                        "down": whole + middle["down"],
                        "site cpu seconds": middle["site seconds"],
                        "server cpu seconds": middle["server seconds"],
                    },
                }
            )
    return found


def whole_models(clients: int, layers: int, rounds: int) -> dict[str, Any]:
    """How often a model comes out of the exchange as one client trained it, and how often it takes to prevent that."""
    wholes, exchanges, given_up = 0, list[int](), 0
    for number in range(rounds):
        start = {client: [torch.tensor([client]) for _ in range(layers)] for client in range(clients)}
        seen: set[str] = set()

        def draws(purpose: str, *, client: int, number: int = number, seen: set[str] = seen) -> np.random.Generator:
            seen.add(purpose)
            return RngStreams(0).numpy(purpose, number, client)

        once = exchange_model_layers(start, draws, 0.5)
        assert once is not None, "a single exchange is never given up"
        wholes += wholes_in(once)
        given_up += exchange_layers_until_mixed(start, draws, 0.5) is None
        exchanges.append(len(seen))
    return {
        "clients": clients,
        "layers": layers,
        "whole": round(wholes / (rounds * clients), 4),
        "exchanges until mixed": round(float(np.mean(exchanges)), 2),
        f"not mixed after {MOST}": round(given_up / rounds, 4),
    }


def wholes_in(models: Mapping[int, list[torch.Tensor]]) -> int:
    return sum(layers_have_single_owner(int(layer) for layer in model) for model in models.values())


def linked(rounds: int) -> dict[str, Any]:
    """How often the server is right about whose a layer is."""
    settings = {"method": "fedmr", "data": "digits", "partition": "dirichlet:0.5", "clients": 10, "per_round": 10}
    config = make_config(
        {**settings, "rounds": rounds, "seed": 0, "engine": "plain", "options": {"fedmr": {"secure": True}}}
    )
    right: list[float] = []
    with build_run(config).engine_closed() as experiment:
        server: Any = experiment.rounds.parts.server
        for number in range(rounds):
            sent = server.bank.rows.clone()
            experiment.rounds.play(number)
            trained, got = server._uploaded.rows, server.bank.rows
            hits = []
            for parts in server.layers:
                columns = torch.cat([torch.arange(part.start, part.stop) for part in parts])
                guess = torch.cdist(got[:, columns], sent[:, columns]).argmin(1)
                owner = (got[:, None, columns] == trained[None, :, columns]).all(2).int().argmax(1)
                hits += (guess == owner).tolist()
            right.append(sum(hits) / len(hits))
    return {
        "settings": {**settings, "fedmr.secure": True},
        "by round": [round(share, 3) for share in right],
        "by chance": 0.1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "bytes and cpu": costs(),
        "whole": [whole_models(k, layers, 300) for k in (3, 5, 10) for layers in (2, 4, 8, 20)],
        "linked": linked(10),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
