"""Measure the cost of the secure exchange, and what a server can still learn.

docs/secure-recombination.md shows the figures:

- `bytes and cpu`: bytes of one client in one round, up and down, for models of 55 thousand and 1.7 million parameters:
  without an exchange, with an open exchange of layers (computed, on average), and with encrypted layers (counted). CPU
  seconds of the cryptography in one round for one site and for the server. All sites run in one process, so the figure
  of a site is their sum divided by their number.
- `whole`: the share of models after one exchange whose layers all come from one client, by clients and layers, and the
  number of exchanges that `mixed` takes.
- `linked`: FedMR on the digits with ten clients of skewed classes. The server compares each layer that it receives with
  the models that it sent in this round, and guesses the nearest as its origin. The figure is the share of correct
  guesses by round.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import make_config
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.flower.secure_recombination.crypto import CryptoTerms, LayerKeyPair
from fedloom.flower.secure_recombination.participant import ExchangeParticipant, run_participant_stage
from fedloom.flower.secure_recombination.relay import Relay, RelayMessage
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import (
    MOST,
    exchange_layers_until_mixed,
    exchange_model_layers,
    layers_have_single_owner,
)
from fedloom.models import build_model
from fedloom.runs.build import build_run
from fedloom.runs.resolve import resolve_run

RUN = "0" * 32


def layer_sizes(model: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of each layer."""
    layout = Layout.of(build_model(model, shape, 10))
    columns = layout.layer_columns().values()
    return tuple(4 * sum(part.stop - part.start for part in parts) for parts in columns)


def secure_exchange(clients: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Run one exchange; return the bytes of one client, and the CPU time of one site and of the server."""
    identities = [Identity.new() for _ in range(clients)]
    site_keys = SiteKeys.parse("".join(one.public_line(f"site-{k}") for k, one in enumerate(identities)))
    key = LayerKeyPair()
    terms = CryptoTerms(sizes, 0.5, False, key.public)
    layers = [np.random.default_rng(0).normal(size=size // 4).astype(np.float32).tobytes() for size in sizes]
    spent = 0.0

    def ask(stage: str, requests: dict[int, RelayMessage]) -> dict[int, RelayMessage]:
        nonlocal spent
        start = time.process_time()
        replies = {slot: run_participant_stage(sites[slot], stage, request) for slot, request in requests.items()}
        spent += time.process_time() - start
        return replies

    sites = {
        k: ExchangeParticipant(identity, site_keys, RUN, 0, k, layers, terms, min_sites=2)
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
    """Return bytes and CPU seconds for two networks and several numbers of clients."""
    found = []
    for model, shape in (("mlp", (1, 8, 8)), ("cnn", (1, 28, 28))):
        sizes = layer_sizes(model, shape)
        whole = sum(sizes)
        for clients in (3, 5, 10):
            runs = [secure_exchange(clients, sizes) for _ in range(5)]
            middle = {name: sorted(run[name] for run in runs)[2] for name in runs[0]}
            found.append(
                {
                    "model": model,
                    "parameters": whole // 4,
                    "layers": len(sizes),
                    "clients": clients,
                    "a model": whole,
                    "plain": {"up": whole, "down": whole},
                    # a client sends half of its layers to others and receives as many
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
    """Return how often all layers of a model come from one client, and how many exchanges prevent it."""
    wholes, exchanges, given_up = 0, list[int](), 0
    for number in range(rounds):
        start = {client: [torch.tensor([client]) for _ in range(layers)] for client in range(clients)}
        seen: set[str] = set()

        def draws(purpose: str, *, client_id: int, number: int = number, seen: set[str] = seen) -> np.random.Generator:
            seen.add(purpose)
            return RngStreams(0).numpy(purpose, number, client_id)

        once = exchange_model_layers(start, draws, 0.5)
        assert once is not None, "a single exchange always succeeds"
        wholes += count_whole_models(once)
        given_up += exchange_layers_until_mixed(start, draws, 0.5) is None
        exchanges.append(len(seen))
    return {
        "clients": clients,
        "layers": layers,
        "whole": round(wholes / (rounds * clients), 4),
        "exchanges until mixed": round(float(np.mean(exchanges)), 2),
        f"not mixed after {MOST}": round(given_up / rounds, 4),
    }


def count_whole_models(models: Mapping[int, list[torch.Tensor]]) -> int:
    """Count the models whose layers all come from one client."""
    return sum(layers_have_single_owner(int(layer) for layer in model) for model in models.values())


def linked(rounds: int) -> dict[str, Any]:
    """Return how often the server guesses the origin of a layer correctly."""
    settings = {
        "method": "fedmr",
        "data": "digits",
        "partition": "dirichlet:0.5",
        "clients": 10,
        "clients_per_round": 10,
    }
    config = make_config(
        {**settings, "rounds": rounds, "seed": 0, "engine": "sequential", "options": {"fedmr": {"secure": True}}}
    )
    correct: list[float] = []
    with build_run(resolve_run(config)).engine_closed() as experiment:
        server: Any = experiment.rounds.parts.server
        for number in range(rounds):
            sent = server.bank.rows.clone()
            experiment.rounds.run_round(number)
            trained, received = server._uploaded.rows, server.bank.rows
            hits = []
            for parts in server._layers:
                columns = torch.cat([torch.arange(part.start, part.stop) for part in parts])
                guess = torch.cdist(received[:, columns], sent[:, columns]).argmin(1)
                owner = (received[:, None, columns] == trained[None, :, columns]).all(2).int().argmax(1)
                hits += (guess == owner).tolist()
            correct.append(sum(hits) / len(hits))
    return {
        "settings": {**settings, "fedmr.secure": True},
        "by round": [round(share, 3) for share in correct],
        "by chance": 0.1,
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("secure-exchange", __doc__)
    add_out(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {
        "command": command_of("secure-exchange", arguments),
        "machine": describe_machine(),
        "bytes and cpu": costs(),
        "whole": [whole_models(k, layers, 300) for k in (3, 5, 10) for layers in (2, 4, 8, 20)],
        "linked": linked(10),
    }
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
