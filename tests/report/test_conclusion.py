"""The sentences of a comparison claim what the seeds show, and never contradict each other."""

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom.report import RunRecord, make_comparison_table
from fedloom.report.conclusion import _judge_groups

HOLD = "\N{NO-BREAK SPACE}"


def run(method, seed, value, metric="accuracy"):
    asked = {"method": method, "seed": seed, "data": "digits", "rounds": 1}
    return RunRecord(Path(f"{method}-{seed}"), asked, [{"round": 1, metric: value}], {})


def compared(scores, metric="accuracy"):
    """A comparison of runs whose results are `scores[method]`, one for each seed."""
    return make_comparison_table(
        [run(method, seed, value, metric) for method, values in scores.items() for seed, value in enumerate(values)]
    )


AVG = [0.800, 0.801, 0.802]


def test_a_significant_difference_is_called_so_with_its_size_and_p_value():
    said = compared({"fedavg": AVG, "fedmr": [0.900, 0.902, 0.904]}).headline
    assert said == (
        f"fedmr has the highest accuracy: 90.2{HOLD}±{HOLD}0.2{HOLD}% (last evaluation, 3 seeds). fedmr (+10.1 points, "
        f"p < 0.001) is significantly higher than fedavg (80.1{HOLD}±{HOLD}0.1{HOLD}%)."
    )


def test_noise_is_called_no_significant_difference():
    said = compared({"fedavg": AVG, "fedmr": [0.795, 0.805, 0.815], "fedprox": [0.81, 0.79, 0.80]}).headline
    assert "show no significant difference from fedavg (80.1" in said
    assert "significantly" not in said


def test_a_lower_method_is_called_lower():
    said = compared({"fedavg": AVG, "fedmr": [0.7, 0.702, 0.704]}).headline
    assert said.startswith("fedavg has the highest accuracy")
    assert "fedmr (−9.9 points, p < 0.001) is significantly lower than fedavg" in said


def test_a_method_that_scatters_is_not_level_with_one_that_is_closer_and_differs():
    """`wild` is lower than `steady`, which is significantly lower: no significant difference would contradict that."""
    said = compared({"fedavg": AVG, "steady": [0.75, 0.751, 0.7523], "wild": [0.5, 0.9, 0.6]}).headline
    assert "steady (−5.0 points, p < 0.001) is significantly lower" in said
    assert "wild (−13.4 points, p = 0.38) varies too much over seeds to be judged." in said
    assert "no significant" not in said


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_too_few_seeds_differences_cannot_be_judged(seeds):
    said = compared({"fedavg": AVG[:seeds], "fedmr": [0.9, 0.901][:seeds]}).headline
    assert said.endswith("With fewer than 3 common seeds, differences between methods cannot be judged.")
    assert "significant" not in said


def test_a_method_with_too_few_seeds_does_not_spoil_the_verdict_on_others():
    said = compared({"fedavg": AVG, "fedmr": [0.900, 0.902, 0.904], "fedprox": [0.7]}).headline
    assert "significantly higher than fedavg" in said
    assert said.endswith(f"fedprox (70.0{HOLD}%) cannot be judged: fewer than 3 common seeds.")


def test_of_a_regression_the_lowest_error_is_best():
    said = compared({"fedavg": [0.5, 0.501, 0.502], "fedmr": [0.3, 0.301, 0.3022]}, metric="loss").headline
    assert said.startswith(f"fedmr has the lowest error: test loss 0.301{HOLD}±{HOLD}0.001 (last evaluation, 3 seeds).")
    assert "fedmr (−0.200, p < 0.001) is significantly lower than fedavg (0.501" in said
    assert "accuracy" not in said


def test_one_method_alone_has_a_result_and_no_comparison():
    assert compared({"fedavg": [0.7]}).headline == f"fedavg has a test accuracy of 70.0{HOLD}% (last evaluation)."


def test_a_reference_without_result_is_said():
    nan = float("nan")
    said = compared({"fedavg": [nan] * 3, "fedmr": AVG}).headline
    assert said.endswith("fedavg has no result, so no method is compared with it.")


SEEDS = st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=3, max_size=5)
STEADY = st.tuples(st.integers(100, 900), st.integers(0, 3), st.integers(3, 5)).map(
    lambda of: [of[0] / 1000 + of[1] * seed * (-1) ** seed / 10_000 for seed in range(of[2])]
)
"""Results of seeds that hardly vary, so that significant differences occur."""


@given(
    scores=st.lists(st.one_of(SEEDS, STEADY, STEADY), min_size=2, max_size=7),
    metric=st.sampled_from(["accuracy", "loss"]),
)
def test_no_verdict_contradicts_another(scores, metric):
    comparison = compared({f"m{at}": values for at, values in enumerate(scores)}, metric)
    groups = comparison.groups[1:]
    verdicts = dict(zip([group.short for group in groups], _judge_groups(groups), strict=True))
    for sign, word in ((1, "higher"), (-1, "lower")):
        far = [group for group in groups if verdicts[group.short] == word]
        for level in (group for group in groups if verdicts[group.short] == "level"):
            for group in far:
                assert sign * (group.difference.mean - level.difference.mean) > 0
                assert sign * (group.result.mean - level.result.mean) > 0
    for group in groups:
        if verdicts[group.short] in ("higher", "lower"):
            assert group.difference.p < 0.05
    # The sentences say exactly the verdicts: each method that is compared is in one of them, and in the right one.
    named = {}
    for sentence in comparison.headline.split(". ")[1:]:
        word = next(
            verdict
            for verdict, text in (
                ("higher", "significantly higher"),
                ("lower", "significantly lower"),
                ("level", "no significant difference"),
                ("scattered", "too much over seeds"),
            )
            if text in sentence
        )
        named |= dict.fromkeys(re.findall(r"(m\d) \([−+]?[\d.]+(?: points)?, p", sentence), word)
    assert named == verdicts


@given(scores=st.lists(STEADY, min_size=2, max_size=4), data=st.data())
def test_the_order_of_the_seeds_and_of_the_other_methods_changes_no_verdict(scores, data):
    length = min(map(len, scores))
    scores = {f"m{at}": values[:length] for at, values in enumerate(scores)}
    seeds, names = data.draw(st.permutations(range(length))), data.draw(st.permutations(list(scores)[1:]))
    assume(names != list(scores)[1:] or seeds != list(range(length)))
    turned = {name: [scores[name][seed] for seed in seeds] for name in ["m0", *names]}

    def verdicts(given_scores):
        groups = compared(given_scores).groups[1:]
        return dict(zip([group.short for group in groups], _judge_groups(groups), strict=True))

    assert verdicts(scores) == verdicts(turned)
