"""Tests of the comparison table: groups, means, intervals, conclusions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.report import RunRecord, make_comparison_table, read_run_record
from fedloom.utils.formatting import format_bytes, format_list, format_seconds, format_signed
from fedloom.utils.storage import read_json, write_json
from tests.support.fake_runs import write_run, write_runs


def run(method="fedavg", seed=0, curve=(0.1, 0.5, 0.9), finished=True, metric="accuracy", **config):
    history = [{"round": at, metric: value} for at, value in enumerate(curve, start=1)]
    asked = {"method": method, "seed": seed, "data": "digits", **config}
    return RunRecord(Path(f"{method}-{seed}"), asked, history, {} if finished else None)


def test_the_result_is_the_last_evaluation_of_a_short_run_and_not_the_best():
    (group,) = make_comparison_table([run(curve=(0.1, 0.95, 0.7))]).groups
    assert group.accuracy.mean == 0.7
    assert group.best_accuracy.mean == 0.95
    assert "70.0" in make_comparison_table([run(curve=(0.1, 0.95, 0.7))]).headline


def test_the_result_is_the_mean_of_the_window_and_its_deviation_has_a_column():
    curves = [(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7, 0.6, 0.8), (0.1,) * 8 + (0.5, 0.9)]
    comparison = make_comparison_table([run(seed=seed, curve=curve) for seed, curve in enumerate(curves)])
    (group,) = comparison.groups
    assert group.windows == (2,)
    assert group.accuracy.values == pytest.approx((0.7, 0.7))
    assert group.window_std.values == pytest.approx((np.sqrt(0.02), np.sqrt(0.08)))
    titles, (row,) = comparison.table("brief")
    assert row[titles.index("sd in window")] == f"{100 * (np.sqrt(0.02) + np.sqrt(0.08)) / 2:.2f}"
    assert comparison.caption == (
        "Results on test data: mean of the last 2 evaluations, ± standard deviation over seeds."
    )
    assert "(mean of the last 2 evaluations, 2 seeds)" in comparison.headline


def test_the_window_of_a_stopped_run_is_that_of_the_planned_run():
    record = run(curve=np.linspace(0.1, 0.8, 8), finished=False, rounds=20, eval_every=2, window=5)
    assert make_comparison_table([record]).groups[0].windows == (2,)
    assert make_comparison_table([record], window=1).groups[0].accuracy.mean == pytest.approx(0.8)


def test_different_windows_have_a_column():
    short, long = run("fedavg", curve=[0.5] * 5), run("fedmr", curve=[0.5] * 20)
    titles, rows = make_comparison_table([short, long]).table()
    assert [row[titles.index("window")] for row in rows] == ["1", "4"]
    assert "window" not in make_comparison_table([short]).table()[0]
    mixed = make_comparison_table([short, run("fedavg", 1, curve=[0.5] * 20)])
    assert mixed.notes == ("fedavg: its runs average the last 1 to 4 evaluations.",)


def test_a_window_below_one_is_refused():
    with pytest.raises(InputError, match=r"the window must be 1 evaluation or more, not 0\."):
        make_comparison_table([run()], window=0)


def test_the_model_before_training_counts_nowhere():
    record = run(curve=(0.2, 0.3))
    record.history.insert(0, {"round": 0, "accuracy": 0.9})
    (group,) = make_comparison_table([record], target_accuracy=0.25).groups
    assert (group.accuracy.mean, group.best_accuracy.mean, group.rounds_to_target) == (0.3, 0.3, 2.0)
    del record.history[1:]
    assert make_comparison_table([record]).headline == "No round has been evaluated yet."


def test_a_run_that_diverged_at_the_end_has_no_result():
    comparison = make_comparison_table([run(curve=(0.1, 0.9, float("nan"))), run(seed=1)])
    assert comparison.groups[0].accuracy.values == (0.9,)
    assert any("no final accuracy with seed 0" in note for note in comparison.notes)
    lost = make_comparison_table([run(), run("fedmr", curve=(0.5, float("nan")))])
    assert lost.notes == ("fedmr has no result: its last evaluations are not finite.",)


def test_mean_and_sample_deviation_by_hand():
    (group,) = make_comparison_table(
        [run(seed=seed, curve=[value]) for seed, value in enumerate((0.7, 0.8, 0.9))]
    ).groups
    assert group.accuracy.mean == pytest.approx(0.8)
    assert group.accuracy.std == pytest.approx(0.1)
    assert group.accuracy.show(100) == "80.00 ± 10.00"
    (single,) = make_comparison_table([run(curve=[0.7])]).groups
    assert single.accuracy.show(100) == "70.00"


def test_own_models_have_columns_where_a_method_makes_some():
    common, own = run("fedavg", curve=[0.5]), run("fedrep", curve=[0.4])
    own.history[-1] |= {"personal_accuracy_mean": 0.9, "personal_accuracy_worst10": 0.7}
    assert "own models %" not in make_comparison_table([common]).table()[0]
    titles, rows = make_comparison_table([common, own]).table()
    at = titles.index("own models %")
    assert titles[at + 1] == "worst own %"
    assert [row[at : at + 2] for row in rows] == [["–", "–"], ["90.00", "70.00"]]
    assert "Own models" in make_comparison_table([common, own]).footnote()
    assert "own models %" in make_comparison_table([common, own]).table("brief")[0]


def test_differences_are_paired_over_common_seeds():
    # Seeds move both methods by far more than the methods differ; pairing sees 1, 2 and 3 points.
    first = [run("fedavg", seed, [0.5 + 0.1 * seed]) for seed in range(4)]
    second = [run("fedmr", seed, [0.5 + 0.1 * seed + 0.01 * (seed + 1)]) for seed in range(3)]
    gap = make_comparison_table([*first, *second]).groups[1].difference
    assert (gap.reference, gap.seeds) == ("fedavg", 3)
    assert gap.mean == pytest.approx(0.02)
    assert gap.half == pytest.approx(4.302653 * 0.01 / np.sqrt(3))  # t(0.975, 2) from a table
    assert gap.p == pytest.approx(1 - np.sqrt(6 / 7))  # t = √12 with 2 degrees of freedom: 1 - t / √(t² + 2)


def test_one_common_seed_gives_a_difference_but_no_interval():
    comparison = make_comparison_table([run("fedavg"), run("fedmr", curve=[0.95])])
    gap = comparison.groups[1].difference
    assert gap.mean == pytest.approx(0.05)
    assert gap.half is None
    assert gap.p is None


def test_seeds_that_agree_to_the_digit_prove_nothing():
    # One test sample more at every seed: the spread is zero because accuracy is coarse.
    avg, prox = ([run(name, seed, [0.8 + 0.1 * seed + step]) for seed in range(3)]
                 for name, step in (("fedavg", 1 / 359), ("fedprox", 0)))  # fmt: skip
    gap = make_comparison_table([*avg, *prox]).groups[1].difference
    assert (gap.half, gap.p) == (None, 1.0)


def test_two_seeds_have_an_interval_but_decide_nothing():
    avg, prox = ([run(name, seed, [top + 0.001 * top * seed]) for seed in range(2)]
                 for name, top in (("fedavg", 0.5), ("fedprox", 0.9)))  # fmt: skip
    gap = make_comparison_table([*avg, *prox]).groups[1].difference
    assert 0 < gap.half < gap.mean
    assert gap.p is None


def test_without_accuracy_the_lowest_loss_is_best():
    records = [run(name, seed, [2.0, loss + 0.001 * seed], metric="loss")
               for name, loss in (("fedavg", 0.5), ("fedmr", 0.3)) for seed in range(3)]  # fmt: skip
    comparison = make_comparison_table(records)
    assert comparison.headline.startswith("fedmr has the lowest error: test loss 0.301\N{NO-BREAK SPACE}±")
    assert comparison.groups[1].difference.mean == pytest.approx(-0.2)
    assert "accuracy %" not in comparison.table()[0]
    assert "loss" in comparison.table("brief")[0]


def test_rounds_to_a_target_count_a_seed_that_never_gets_there():
    curves = [(0.1, 0.8, 0.9), (0.1, 0.2, 0.9), (0.1, 0.2, 0.3)]
    (group,) = make_comparison_table(
        [run(seed=seed, curve=curve) for seed, curve in enumerate(curves)], target_accuracy=0.8
    ).groups
    assert (group.rounds_to_target, group.reached) == (3.0, 2)
    assert (
        "3 (2 of 3 seeds)"
        in make_comparison_table([run(seed=s, curve=c) for s, c in enumerate(curves)], 0.8).table()[1][0]
    )
    (two,) = make_comparison_table(
        [run(seed=seed, curve=curve) for seed, curve in enumerate(curves[1:])], target_accuracy=0.8
    ).groups
    assert two.rounds_to_target is None


def test_the_default_target_is_a_share_of_the_best_final_accuracy():
    comparison = make_comparison_table([run("fedavg", curve=[0.5]), run("fedmr", curve=[0.875])])
    assert {group.target for group in comparison.groups} == {0.78}
    assert "rounds to 78 %" in comparison.table()[0]


@pytest.mark.parametrize(("test_counts", "chance"), [([60, 30, 10], 0.6), (None, 1 / 3), ([0, 0, 0], 1 / 3)])
def test_no_target_at_or_below_guessing(tmp_path, test_counts, chance):
    folder = write_run(tmp_path / "run", classes=3)
    partition = read_json(folder / "partition.json")
    write_json(folder / "partition.json", partition | {"test_counts": test_counts or []})
    record = read_run_record(folder)
    assert record.chance == pytest.approx(chance)
    above = make_comparison_table([record], chance + 0.01)
    assert above.groups[0].target == chance + 0.01
    at = make_comparison_table([record], chance)
    assert at.groups[0].target is None
    assert at.notes == (
        f"The target {100 * chance:.2f} % is not above the accuracy of guessing ({100 * chance:.2f} %) on "
        f"{at.groups[0].task}, so rounds to it are not counted.",
    )
    for row in record.history:
        row["accuracy"] = chance
    weak = make_comparison_table([record])
    assert not any(title.startswith("rounds to") for title in weak.table()[0])
    assert weak.notes == ()


@pytest.mark.parametrize("target", [0, -1, 80, float("nan")])
def test_a_target_that_is_no_share_is_refused(target):
    with pytest.raises(InputError, match="target"):
        make_comparison_table([run()], target)


def test_nothing_to_compare():
    with pytest.raises(InputError, match="no runs"):
        make_comparison_table([])


def test_labels_say_what_differs_within_a_method_and_no_more():
    records = [run("fedprox", mu_seed, options={"fedprox": {"mu": mu}}, workers=mu_seed)
               for mu in (0.01, 0.1) for mu_seed in range(2)]  # fmt: skip
    comparison = make_comparison_table([run("fedavg"), run("fedavg", 1), *records])
    assert [group.label for group in comparison.groups] == ["fedavg", "fedprox · mu=0.01", "fedprox · mu=0.1"]
    assert [len(group.runs) for group in comparison.groups] == [2, 2, 2]


def test_each_task_has_its_own_reference_and_one_colour_a_method():
    kinds = [(part, method) for part in ("iid", "dirichlet:0.1") for method in ("fedavg", "fedmr")]
    records = [run(method, seed, partition=part) for part, method in kinds for seed in range(2)]
    groups = make_comparison_table(records[::-1]).groups
    assert [group.label for group in groups] == [
        "fedmr · dirichlet:0.1", "fedavg · dirichlet:0.1", "fedmr · iid", "fedavg · iid",
    ]  # fmt: skip
    assert [group.difference and group.difference.reference for group in groups] == [None, "fedmr", None, "fedmr"]
    assert [group.kind for group in groups] == [0, 1, 0, 1]
    assert len(make_comparison_table(records).headlines) == 2


def test_settings_that_differ_only_between_tasks_are_not_in_labels():
    records = [run(clients=10, lr=0.1), run(clients=20, lr=0.3), run("fedprox", clients=20, lr=0.3)]
    assert [group.short for group in make_comparison_table(records).groups] == ["fedavg", "fedavg", "fedprox"]
    groups = make_comparison_table([*records, run(clients=20, lr=0.5)]).groups
    assert [group.short for group in groups] == ["fedavg", "fedavg · lr=0.3", "fedprox", "fedavg · lr=0.5"]


def test_other_settings_that_differ_between_methods_are_confessed():
    assert any(
        "differ in lr" in note for note in make_comparison_table([run("fedavg", lr=0.1), run("fedmr", lr=0.01)]).notes
    )
    own = make_comparison_table([run("fedavg"), run("fedprox", options={"fedprox": {"mu": 1.0}})])
    assert not any("differ in" in note for note in own.notes)


def test_what_a_variant_sets_on_purpose_is_not_confessed():
    fedavg, fedmr = run("fedavg", lr=0.1), run("fedmr", lr=0.1)
    variant = run("fedavg", lr=0.01, variant="fedavg:lr=0.01")
    comparison = make_comparison_table([fedavg, variant, fedmr])
    assert [group.label for group in comparison.groups] == ["fedavg", "fedavg:lr=0.01", "fedmr"]
    assert not any("differ in" in note for note in comparison.notes)
    others = make_comparison_table([fedavg, variant, run("fedmr", lr=0.2)])
    assert any("differ in lr" in note for note in others.notes), "fedavg and fedmr differ by no variant"
    option = run("lss", lr=0.2, variant="lss:lr=5", options={"lss": {"lr": 5}})
    assert any("differ in lr" in note for note in make_comparison_table([fedavg, option]).notes), "it sets its option"
    longer = run("fedavg", epochs=2, variant="fedavg:epochs=2")
    notes = make_comparison_table([run("fedmr", epochs=1, steps=5), longer]).notes
    assert not any("differ in" in note for note in notes), "epochs replace steps"


def test_rows_of_one_variant_with_other_settings_are_told_apart():
    records = [run("fedavg", lr=lr, variant="fedavg:momentum=0.9", momentum=0.9) for lr in (0.1, 0.2)]
    labels = [group.label for group in make_comparison_table([*records, run("fedavg", momentum=0.0)]).groups]
    assert labels == ["fedavg:momentum=0.9 · lr=0.1", "fedavg:momentum=0.9 · lr=0.2", "fedavg"]


def test_an_unfinished_seed_is_left_out_of_the_mean_and_said():
    comparison = make_comparison_table([run(rounds=2), run(seed=1, curve=[0.2], finished=False, rounds=2)])
    assert comparison.groups[0].accuracy.values == (0.9,)
    assert any("unfinished runs are left out: seed 1 at round 1 of 2" in note for note in comparison.notes)
    assert make_comparison_table([run(finished=False)]).headline.startswith("So far, ")


def test_a_run_given_twice_counts_once():
    comparison = make_comparison_table([run(), run(), run(curve=[0.3], finished=False)])
    assert comparison.groups[0].accuracy.values == (0.9,)
    assert any("more than once" in note for note in comparison.notes)


def test_a_run_that_lost_most_answers_says_so():
    def losing(failed: int) -> RunRecord:
        record = run(curve=(0.1, 0.1, 0.1))
        for row in record.history[1:]:
            row |= {"clients": 10, "failed": failed}
        return record

    said = "fedavg: 12 of 20 client tasks failed; the report lists the reasons."
    assert make_comparison_table([losing(6)]).notes == (said,)
    assert make_comparison_table([losing(5)]).notes == ()


def test_a_run_without_any_evaluation():
    comparison = make_comparison_table([run(curve=())])
    assert comparison.headline == "No round has been evaluated yet."
    assert comparison.table() == (["method", "seeds"], [["fedavg", "1"]])


def test_realistic_runs(tmp_path):
    comparison = make_comparison_table([read_run_record(folder) for folder in write_runs(tmp_path)])
    titles, rows = comparison.table()
    assert [row[0] for row in rows] == ["fedavg", "fedcross", "fedmr"]
    assert {len(row) for row in rows} == {len(titles)}
    assert "40.7 MB" in rows[0]
    assert titles.index("accuracy %") < titles.index("best round %")
    assert set(comparison.table("brief")[0]) - set(titles) == {"sent"}, "a terminal shows both directions in one"
    assert comparison.notes == ()


def test_lost_clients_are_counted(tmp_path):
    record = read_run_record(write_run(tmp_path / "run"))
    (group,) = make_comparison_table([record]).groups
    assert group.failed == sum(len(row.get("failed_clients", {})) for row in record.history) > 0
    assert group.asked == 5 * 40


@given(records=st.lists(st.builds(
    run,
    method=st.sampled_from(["a", "b", "a+b"]),
    seed=st.integers(0, 3),
    curve=st.lists(st.one_of(st.floats(0, 1), st.just(float("nan")), st.none()), max_size=4),
    finished=st.booleans(),
    metric=st.sampled_from(["accuracy", "loss"]),
    lr=st.sampled_from([0.1, 0.2]),
    partition=st.sampled_from(["iid", "shards:2"]),
), min_size=1, max_size=12))  # fmt: skip
def test_whatever_the_runs_every_one_is_in_a_group_with_its_own_label(records):
    comparison = make_comparison_table(records)
    members = [id(one.history) for group in comparison.groups for one in group.records]
    assert sorted(members) == sorted(id(record.history) for record in records)
    labels = [group.label for group in comparison.groups]
    assert len(set(labels)) == len(labels)
    titles, rows = comparison.table()
    assert all(len(row) == len(titles) for row in rows)
    assert comparison.headline


@pytest.mark.parametrize(("count", "text"), [
    (None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (203_560, "204 kB"), (999_999, "1.00 MB"),
    (40_712_000, "40.7 MB"), (1.5e12, "1.50 TB"), (9_996, "10.0 kB"), (2e18, "2000 PB"), (99_960, "100 kB"),
])  # fmt: skip
def test_human_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "–"), (0.4242, "0.42 s"), (9.999, "10.0 s"), (59.97, "1 min 00 s"), (250, "4 min 10 s"),
    (3599.9, "1 h 00 min"), (7500, "2 h 05 min"), (86_400 * 3 + 4 * 3600, "3 d 4 h"),
])  # fmt: skip
def test_human_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_small_words():
    assert [format_signed(value) for value in (0.001, -0.001, 1.5, -1.5)] == ["0.00", "0.00", "+1.50", "−1.50"]
    assert [format_list(list("abc")[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert format_list([str(at) for at in range(9)]) == "0, 1, 2, 3, 4 and 4 more"
