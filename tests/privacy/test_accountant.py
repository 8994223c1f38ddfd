"""Tests of epsilon against published figures and formulas by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from fedloom.errors import InputError
from fedloom.privacy import PrivacyAccountant

# McMahan et al., ICLR 2018, table 1: users, users in a round, noise z, and epsilon after 1, 10, ... 10^6 rounds at
# delta = 1 / users^1.1.
PUBLISHED = [
    (1e5, 1e2, 1.0, (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50)),
    (1e6, 1e1, 1.0, (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73)),
    (1e6, 1e3, 1.0, (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13)),
    (1e6, 1e4, 1.0, (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01)),
]


def moments(q: float, z: float, order: int) -> float:
    """The Rényi divergence of one Poisson-sampled Gaussian round at a whole order: Mironov et al. 2019, eq. 3."""
    k = np.arange(order + 1)
    binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = binomial + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z * z)
    return float(logsumexp(terms)) / (order - 1)


@pytest.mark.parametrize(("users", "asked", "z", "table"), PUBLISHED)
def test_the_published_table_is_met_and_bettered(
    users: float, asked: float, z: float, table: tuple[float, ...]
) -> None:
    """The paper's moments accountant gives its figures; the account, by a later and tighter bound, a little less."""
    delta, account = users**-1.1, PrivacyAccountant(z, asked / users, users**-1.1)
    orders = range(2, 33)
    cost = np.array([moments(asked / users, z, order) for order in orders])
    for power, published in enumerate(table):
        rounds = 10**power
        by_moments = min(rounds * cost + math.log(1 / delta) / (np.array(orders) - 1))
        assert round(by_moments, 2) == published
        assert 0.7 * published < account._renyi_epsilon(rounds) < published + 0.005


@pytest.mark.parametrize(("q", "z", "rounds"), [(0.01, 1.1, 500), (0.2, 2.0, 30), (0.5, 4.0, 100)])
def test_epsilon_is_that_of_the_divergences_worked_out_by_hand(q: float, z: float, rounds: int) -> None:
    """At the best whole order, by Canonne, Kamath and Steinke 2020, proposition 12."""
    delta = 1e-4
    bounds = [
        rounds * moments(q, z, order) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order in range(2, 64)
    ]
    epsilon = PrivacyAccountant(z, q, delta)._renyi_epsilon(rounds)
    assert epsilon <= min(bounds) * (1 + 1e-9)
    assert epsilon >= 0.97 * min(bounds)  # orders that are no whole numbers may be a little better


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (5.0, 30), (20.0, 1000)])
def test_where_all_take_part_epsilon_is_no_less_than_the_exact_one(z: float, rounds: int) -> None:
    """T rounds are one Gaussian with Z / sqrt(T), whose delta is known exactly (Balle and Wang 2018, theorem 8)."""
    mu, delta = math.sqrt(rounds) / z, 1e-5

    def excess(epsilon: float) -> float:
        exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        return float(exact) - delta

    exact = brentq(excess, 0, 100)
    assert exact <= PrivacyAccountant(z, 1.0, delta).epsilon(rounds) <= 1.15 * exact


@settings(max_examples=5)
@given(st.floats(0.4, 20), st.floats(0.001, 1), st.integers(1, 500))
def test_more_rounds_cost_more_and_more_noise_costs_less(z: float, q: float, rounds: int) -> None:
    account = PrivacyAccountant(z, q, 1e-5)
    spent = [account.epsilon(rounds + more) for more in range(3)]
    assert spent == sorted(spent)
    assert PrivacyAccountant(2 * z, q, 1e-5).epsilon(rounds) <= spent[0]
    assert PrivacyAccountant(z, q / 2, 1e-5).epsilon(rounds) <= spent[0] * (1 + 1e-9)
    assert PrivacyAccountant(z, q, 1e-3).epsilon(rounds) <= spent[0]


def test_nothing_is_spent_before_the_first_round_and_nothing_guaranteed_without_noise() -> None:
    assert PrivacyAccountant(1.0, 0.1, 1e-5).epsilon(0) == 0
    assert PrivacyAccountant(0.0, 0.1, 1e-5).epsilon(0) == 0
    assert PrivacyAccountant(0.0, 0.1, 1e-5).epsilon(1) == math.inf


@settings(max_examples=10)
@given(st.floats(0.5, 5), st.floats(0.01, 1), st.floats(0.1, 30), st.integers(1, 200))
def test_as_many_rounds_as_can_be_afforded_and_not_one_more(z: float, q: float, most: float, planned: int) -> None:
    account = PrivacyAccountant(z, q, 1e-4)
    rounds = account.rounds_within(most, planned)
    assert 0 <= rounds <= planned
    assert account.epsilon(rounds) <= most
    assert rounds == planned or account.epsilon(rounds + 1) > most


def test_extreme_noise_gives_a_number_and_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    assert PrivacyAccountant(1e-3, 0.5, 1e-5).epsilon(10) > 1e4
    assert PrivacyAccountant(1e6, 0.5, 1e-5).epsilon(10) < 1e-2
    assert capfd.readouterr().err == ""


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'fedloom\[privacy\]'"):
        PrivacyAccountant(1.0, 0.1, 1e-5).epsilon(1)
    assert PrivacyAccountant(0.0, 0.1, 1e-5).epsilon(1) == math.inf  # no noise, no account


def test_the_library_is_loaded_only_where_it_is_used() -> None:
    code = "import sys; import fedloom.runs.execute; import fedloom.privacy; print('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
