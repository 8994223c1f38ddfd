"""Tests that the CUDA engine on fake graphs gives the stored results."""

import json

import pytest

from tests.golden.cuda import RUNS, machine, observed, stored
from tests.support.core_methods import CORE_METHODS


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_to_what_is_stored(name: str) -> None:
    runs, digests = stored()
    told, digest = observed(name)
    assert json.loads(json.dumps(told)) == runs[name]
    expected = digests.get(machine(), {}).get(name)
    if expected is None:
        pytest.skip(f"the rest is as stored, but no digest is for {name} on {machine()} (make golden-cuda)")
    assert digest == expected


def test_every_stored_run_is_made() -> None:
    runs, digests = stored()
    assert runs.keys() == RUNS.keys()
    assert all(of.keys() <= RUNS.keys() for of in digests.values())
