"""Tests of DynaFed's synthesis: first samples, segments, inner steps, loss."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.errors import FedloomError
from fedloom.methods._support.trajectory_matching import match_trajectory
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from tests.support.small_dynafed import images, refiner_of, samples_of, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_first_samples_are_noise_with_labels_that_say_nothing() -> None:
    with build_small_run("dynafed", tiny(images_per_class=40), model=simple_network).engine_closed() as experiment:
        first = refiner_of(experiment)._synthesis.steps.first_samples(10)
        assert first.images.shape == (400, 64)
        assert abs(float(first.images.mean())) < 0.02
        assert abs(float(first.images.std()) - 1) < 0.02
        assert torch.equal(first.label_logits.softmax(1), torch.full((400, 10), 0.1))
        assert float(first.learning_rate) == 1.0
    with build_small_run("dynafed", tiny(label_init=2.0), model=simple_network).engine_closed() as experiment:
        assert refiner_of(experiment)._synthesis.steps.first_samples(10).label_logits.argmax(1).tolist() == list(
            range(10)
        )


@pytest.mark.parametrize("target", ["last", "two", "several"])
def test_segments_lie_on_the_trajectory(target: str) -> None:
    options = tiny(L=7, s=3, target=target)
    with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
        refiner, size = refiner_of(experiment), experiment.layout.size
        # Rows that hold powers of 4: the digits of a sum then tell which were in it, and how often.
        refiner.trajectory = [torch.full((size,), float(4**place)) for place in range(7)]
        starts, counts = set(), set()
        for n in range(200):
            t, goal = refiner._synthesis.segment(n, refiner.trajectory)
            starts.add(t)
            assert goal.unique().numel() == 1
            models = next(m for count in (1, 2, 3) if len(m := _models(float(goal[0]) * count)) == count)
            used = set(models)
            assert t < min(used)
            assert max(used) <= t + 3
            if target == "last":
                assert used == {t + 3}
            counts.add(len(used))
        assert starts == {0, 1, 2, 3}
        assert max(counts) == {"last": 1, "two": 2, "several": 3}[target]


def _models(total: float) -> list[int]:
    """The places whose powers of 4 add up to `total`; nothing where it is no whole number."""
    if abs(total - round(total)) > 1e-2:
        return []
    return [place for place in range(7) for _ in range(round(total) // 4**place % 4)]


def test_batches_of_the_inner_steps_pass_over_all_samples() -> None:
    options = tiny(images_per_class=2, inner_batch=6, inner_steps=8)
    with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
        steps = refiner_of(experiment)._synthesis.inner_steps(0)
        indices = [step.sample_indices for step in steps]
        assert [len(i) for i in indices if i is not None] == [6, 6, 6, 2] * 2
        passes = [torch.cat([i for i in part if i is not None]) for part in (indices[:4], indices[4:])]
        assert all(sorted(p.tolist()) == list(range(20)) for p in passes)
        assert not torch.equal(*passes)
        again = refiner_of(experiment)._synthesis.inner_steps(0)
        assert all(torch.equal(a.sample_indices, b.sample_indices) for a, b in zip(steps, again, strict=True))  # type: ignore[arg-type]
    with build_small_run("dynafed", tiny(), model=simple_network).engine_closed() as experiment:
        assert [step.sample_indices for step in refiner_of(experiment)._synthesis.inner_steps(0)] == [None, None]


def test_what_is_no_image_is_not_augmented() -> None:
    with build_small_run("dynafed", tiny(), model=simple_network).engine_closed() as experiment:
        assert all(step.augmentation is None for step in refiner_of(experiment)._synthesis.inner_steps(0))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_matching_loss_falls(optimizer: str) -> None:
    rates = {"adam": {}, "sgd": {"image_lr": 20.0, "label_lr": 20.0, "rate_lr": 0.0}}[optimizer]
    options = tiny(L=4, s=2, iterations=40, inner_steps=5, inner_lr=5.0, optimizer=optimizer, **rates)
    with build_small_run("dynafed", options, model=simple_network, epochs=3).engine_closed() as experiment:
        for round in range(4):
            experiment.rounds.run_round(round)
        losses, rate = refiner_of(experiment).losses, refiner_of(experiment).rate
        assert losses is not None
        assert rate is not None
        assert losses[-10:].mean() < 0.9 * losses[:3].mean()
        assert losses[-10:].mean() < 0.9
        assert (float(rate) == 5.0) == (optimizer == "sgd"), "rate_lr = 0 leaves the inner rate alone"


def test_a_zero_inner_rate_has_matching_loss_one_throughout() -> None:
    options = tiny(inner_lr=0.0, rate_lr=0.0, iterations=4)
    with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        refiner = refiner_of(experiment)
        assert refiner.losses is not None
        assert refiner.losses.tolist() == [1.0] * 4
        found = match_trajectory(
            refiner._synthesis.steps.network,
            samples_of(refiner),
            refiner._synthesis.inner_steps(0),
            experiment.rounds.context.initial,
            torch.ones(1),
        )
        assert float(found.loss) == 1.0


def test_checkpointing_changes_memory_and_nothing_else() -> None:
    made = []
    for checkpoint in (True, False):
        options = tiny(checkpoint=checkpoint, iterations=3, inner_steps=4)
        with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
            for round in range(2):
                experiment.rounds.run_round(round)
            made.append(samples_of(refiner_of(experiment)))
    for one, two in zip(made[0].tensors(), made[1].tensors(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_samples_that_are_not_finite_end_the_run() -> None:
    with pytest.raises(FedloomError, match=r"diverged within 2 iterations.*Lower dynafed\.inner_lr"):
        small_run("dynafed", tiny(inner_lr=1e30), model=simple_network)
    with pytest.raises(FedloomError, match=r"round 3: a model is not finite.*lower dynafed\.refine_lr"):
        small_run("dynafed", tiny(refine_lr=3e37, refine_epochs=40), model=simple_network)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_an_iteration_on_a_gpu_does_not_wait_for_it(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(inner_batch=6), "device": "cuda"})
    assert np.isfinite(run.summary["loss"])
    options = tiny(L=4, inner_steps=8, inner_batch=6)
    with build_small_run("dynafed", options, model=simple_network, device="cuda").engine_closed() as experiment:
        for round in range(3):
            experiment.rounds.run_round(round)
        refiner = refiner_of(experiment)
        data = refiner._synthesis.steps.first_samples(10)
        assert all(tensor.is_cuda for tensor in (*data.tensors(), *refiner.trajectory))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n in range(3):
                t, target = refiner._synthesis.segment(n, refiner.trajectory)
                match_trajectory(
                    refiner._synthesis.steps.network,
                    data,
                    refiner._synthesis.inner_steps(n),
                    refiner.trajectory[t],
                    target,
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
