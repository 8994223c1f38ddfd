"""Tests of random streams: keys fix the draws, global generators stay unchanged."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedloom
from fedloom.core.rng import RngStreams

SOME = ["batches", "noise", "select"]
KEYS = st.tuples(st.integers(0, 2**63 - 1), st.sampled_from(SOME), st.integers(0, 9999), st.integers(0, 10**6))
Key = tuple[int, str, int, int]


def draws(key: Key) -> tuple[int, list[int], list[float]]:
    seed, *rest = key
    streams = RngStreams(seed)
    numbers = streams.numpy(*rest).integers(0, 2**62, 4).tolist()
    return streams.key(*rest), numbers, torch.rand(4, generator=streams.pytorch(*rest)).tolist()


@given(KEYS, KEYS)
@settings(deadline=None, max_examples=100)
def test_draws_are_equal_exactly_when_keys_are(first: Key, second: Key) -> None:
    assert draws(first) == draws(first)
    if first != second:
        assert all(a != b for a, b in zip(draws(first), draws(second), strict=True))


@given(KEYS, st.integers(0, 3), st.integers(1, 1000))
@settings(deadline=None, max_examples=100)
def test_any_changed_component_changes_every_draw(key: Key, place: int, by: int) -> None:
    changed = list(key)
    changed[place] = f"{key[1]}-{by}" if place == 1 else key[place] + by
    assert all(a != b for a, b in zip(draws(key), draws(tuple(changed)), strict=True))  # type: ignore[arg-type]


def test_neighbouring_components_do_not_run_together() -> None:
    streams = RngStreams(1)
    keys = [RngStreams(11).key("p", 1, 1), streams.key("1p", 1, 1), streams.key("p", 11, 1), streams.key("p", 1, 11)]
    assert len({*keys, streams.key("p1", 1, 1), streams.key("p", 1, 1)}) == 6


def test_streams_do_not_depend_on_the_order_of_calls() -> None:
    streams = RngStreams(7)
    forward = [streams.numpy("x", r, c).random() for r in range(3) for c in range(3)]
    backward = [streams.numpy("x", r, c).random() for r in (2, 1, 0) for c in (2, 1, 0)]
    assert forward == backward[::-1]
    one, two = streams.numpy("x", 0, 0), streams.numpy("x", 0, 1)
    mixed = [one.random(), two.random(), one.random(), two.random()]
    assert mixed[::2] == streams.numpy("x", 0, 0).random(2).tolist()
    assert mixed[1::2] == streams.numpy("x", 0, 1).random(2).tolist()


def test_making_and_using_streams_leaves_global_generators_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    streams = RngStreams(3)
    streams.numpy("a").random(5)
    torch.rand(5, generator=streams.pytorch("a"))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_globally_gives_keyed_draws_to_code_that_knows_no_generator() -> None:
    dropout, x, streams = nn.Dropout(0.5), torch.ones(64), RngStreams(5)

    def masked(round: int, client: int) -> torch.Tensor:
        with streams.seed_global_rng("noise", round, client):
            return dropout(x)

    first = masked(1, 2)
    torch.rand(17)
    assert torch.equal(masked(1, 2), first)
    assert not torch.equal(masked(1, 3), first)
    assert not torch.equal(masked(2, 2), first)
    with streams.seed_global_rng("noise", 1, 2):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=streams.pytorch("noise", 1, 2)))


def test_globally_restores_the_global_state_also_after_an_error() -> None:
    torch.manual_seed(123)
    torch.rand(5)
    before = torch.get_rng_state()
    with RngStreams(0).seed_global_rng("noise"), RngStreams(0).seed_global_rng("other"):
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), before)

    def fail() -> None:
        with RngStreams(0).seed_global_rng("noise"):
            torch.rand(1)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_known_answers_so_that_draws_never_change_silently() -> None:
    """Were these to change, no stored run could be resumed or verified any more."""
    streams = RngStreams(42)
    assert streams.key("batches", 3, 17) == 0x476642877D8F6356D33CD29B3F6A0331
    assert streams.numpy("batches", 3, 17).permutation(8).tolist() == [4, 6, 7, 2, 0, 3, 5, 1]
    assert torch.randint(1000, (4,), generator=streams.pytorch("batches", 3, 17)).tolist() == [249, 112, 74, 645]


FROZEN = """
augment, batches, client test, dynafed images, dynafed refine, dynafed segment, dynafed steps, exchange,
exchange {attempt} {number}, fedbe, fedbe dirichlet, fedbe gaussian, fedcda, fedcluster, fedcluster cycle, feddf,
feddf validation, fedgen, fedgen generator, fedlaw, fedma, fedma layer {n}, fedmut, fomo, head, held-out clients, init,
lost, noise, partition, personal, privacy noise, privacy selection, recombine, select, server data, slots,
soup, statistics, validation
"""
"""All purposes that fedloom uses. A rename across the source must not reach these words, which are in one string."""

METHODS = inspect.getmembers(RngStreams, inspect.isfunction)
DRAWING = {name for name, method in METHODS if "purpose" in inspect.signature(method).parameters}
"""Methods of `RngStreams` that take a purpose."""

LENT = {"methods/fedmr.py": "methods/_support/layer_exchange.py"}
"""Files that hand such a method on, by the file whose `layer_exchange_stream_name` says what for."""

SOURCE = Path(fedloom.__file__).parent


def test_the_source_draws_for_exactly_these_purposes() -> None:
    found, lent = set[str](), set[str]()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name == "core/rng.py":
            continue
        tree = ast.parse(path.read_text())
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in DRAWING:
                continue
            if (call := called.get(id(node))) is None:
                if "streams" in ast.unparse(node.value).lower():
                    lent.add(name)
            elif call.args:  # without, it is that of a tensor
                found.update(texts_of(call.args[0], tree, f"{name}:{node.lineno}"))
            else:
                assert not call.keywords, f"{name}:{node.lineno}: give the purpose as the first argument"
    assert lent == LENT.keys()
    for name in LENT.values():
        found.update(said_by("layer_exchange_stream_name", ast.parse((SOURCE / name).read_text()), name))
    assert sorted(found) == re.split(r",\s+", re.sub(r"{\w+}", "{}", FROZEN.strip()))


def texts_of(given: ast.expr, tree: ast.Module, where: str) -> Iterator[str]:
    """All texts that an expression can be, with {} for numbers in them."""
    match given:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)
        case ast.IfExp(body=one, orelse=other):
            yield from texts_of(one, tree, where)
            yield from texts_of(other, tree, where)
        case ast.Name(id=name):
            values = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets) == name]
            assert values, f"{where}: nobody can see what {name} is"
            for value in values:
                yield from texts_of(value, tree, where)
        case ast.Call(func=ast.Name(id=name)):
            assert name == "layer_exchange_stream_name", f"{where}: nobody can see what {name}() says"
        case _:
            pytest.fail(f"{where}: a purpose is written where it is drawn for, not {ast.unparse(given)}")


def said_by(name: str, tree: ast.Module, where: str) -> Iterator[str]:
    """All that a function returns."""
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from texts_of(node.value, tree, where)
