"""DynaFed: when it does what, what it leaves alone, with whom it can be combined, and what it refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.errors import FedloomError, InputError
from fedloom.experiment import Experiment
from fedloom.methods import compose
from fedloom.methods.dynafed import DynaFedOptions, DynaFedRefiner
from fedloom.methods.synthesis import Synthetic, match
from fedloom.rows import Kind, digest
from fedloom.small_runs import normed_network, plain_network, small_experiment, small_run
from fedloom.storage import read_tensors
from fedloom.testing import CHECKS, check_method
from fedloom.watching import Silent

TINY: dict[str, Any] = {
    "L": 2,
    "s": 1,
    "iterations": 2,
    "inner_steps": 2,
    "images_per_class": 1,
    "inner_lr": 1.0,
    "refine_epochs": 2,
    "refine_lr": 0.01,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(**options: Any) -> dict[str, dict[str, Any]]:
    return {"dynafed": {**TINY, **options}}


def refiner_of(experiment: Experiment) -> DynaFedRefiner:
    refiner = experiment.rounds.parts.refiner
    assert isinstance(refiner, DynaFedRefiner)
    return refiner


def images(**options: Any) -> dict[str, Any]:
    """Settings of a quick run on images, with a network of convolutions."""
    made: dict[str, Any] = {"data": "digits", "model": convolutions, "clients": 6, "rounds": 4, "per_round": 3}
    made |= {"epochs": 1, "report": False, "options": tiny(**options), "engine": "plain"}
    return made


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )


# When


@pytest.mark.parametrize(
    ("options", "equal", "differ"),
    [({}, 3, 4), ({"initial": False}, 3, 4), ({"at_once": True}, 2, 3)],
    ids=["paper", "without the initial model", "code"],
)
def test_before_it_fine_tunes_it_is_fedavg_bit_for_bit(options: dict[str, Any], equal: int, differ: int) -> None:
    """With L = 3: Algorithm 2 synthesises in round 3 and fine-tunes from round 4 on; the code already in round 3."""
    for rounds in (equal, differ):
        mine = small_run("dynafed", tiny(L=3, **options), rounds=rounds, model=plain_network).digest
        plain = small_run("fedavg", {}, rounds=rounds, model=plain_network).digest
        assert (mine == plain) == (rounds == equal), rounds


def test_without_epochs_it_is_fedavg_for_ever() -> None:
    mine, plain = (
        small_run(name, options, rounds=5, model=plain_network)
        for name, options in (("dynafed", tiny(refine_epochs=0)), ("fedavg", {}))
    )
    assert mine.digest == plain.digest
    assert mine.records[1]["diagnostics"]["refiner.inner rate"] > 0, "samples were made all the same"


def test_the_trajectory_is_the_deployed_models_each_a_copy() -> None:
    with small_experiment("dynafed", tiny(L=4), model=plain_network).engine_closed() as experiment:
        refiner, server = refiner_of(experiment), experiment.rounds.parts.server
        expected = [digest(experiment.rounds.context.initial)]
        for round in range(3):
            experiment.rounds.play(round)
            expected.append(digest(server.deploy()))
            server.models().add_(1.0)  # what happens to the model later must not reach the trajectory
        assert [digest(row) for row in refiner.trajectory] == expected
        assert len(set(expected)) == 4


def test_without_the_initial_model_the_trajectory_is_one_round_later() -> None:
    with small_experiment("dynafed", tiny(L=3, initial=False), model=plain_network).engine_closed() as experiment:
        refiner, server, lengths = refiner_of(experiment), experiment.rounds.parts.server, []
        seen: list[Tensor] = []
        refiner.synthesise = lambda: lengths.append(list(refiner.trajectory)) or DynaFedRefiner.synthesise(refiner)  # type: ignore[func-returns-value, method-assign]
        for round in range(3):
            experiment.rounds.play(round)
            seen.append(server.deploy().clone())
        assert len(lengths) == 1
        assert all(torch.equal(a, b) for a, b in zip(lengths[0], seen, strict=True))


def test_it_synthesises_once_and_keeps_what_it_made() -> None:
    with small_experiment("dynafed", tiny(), model=plain_network, rounds=5).engine_closed() as experiment:
        refiner, made = refiner_of(experiment), []
        for round in range(5):
            experiment.rounds.play(round)
            made.append(None if refiner.images is None else [digest(t.flatten()) for t in _samples(refiner).tensors()])
        assert made[0] is None
        assert made[1] is not None
        assert made[1:] == [made[1]] * 4
        assert refiner.trajectory == [], "it is not needed any more"


def _samples(refiner: DynaFedRefiner) -> Synthetic:
    assert refiner.images is not None
    assert refiner.logits is not None
    assert refiner.rate is not None
    return Synthetic(refiner.images, refiner.logits, refiner.rate)


def test_a_round_without_an_answer_neither_counts_nor_refines() -> None:
    with small_experiment("dynafed", tiny(), model=plain_network, lost=0.999999).engine_closed() as experiment:
        before = digest(experiment.rounds.parts.server.deploy())
        for round in range(4):
            experiment.rounds.play(round)
        refiner = refiner_of(experiment)
        assert (refiner.seen, refiner.images, len(refiner.trajectory)) == (0, None, 1)
        assert digest(experiment.rounds.parts.server.deploy()) == before
    with small_experiment("dynafed", tiny(), model=plain_network).engine_closed() as experiment:
        rounds, server = experiment.rounds, experiment.rounds.parts.server
        for round in range(3):
            rounds.play(round)
        before = digest(server.deploy())
        refiner_of(experiment).refine(3, server)
        assert digest(server.deploy()) == before


# The synthesis


def test_the_first_samples_are_noise_with_labels_that_say_nothing() -> None:
    with small_experiment("dynafed", tiny(images_per_class=40), model=plain_network).engine_closed() as experiment:
        first = refiner_of(experiment)._first_samples()
        assert first.images.shape == (400, 64)
        assert abs(float(first.images.mean())) < 0.02
        assert abs(float(first.images.std()) - 1) < 0.02
        assert torch.equal(first.logits.softmax(1), torch.full((400, 10), 0.1))
        assert float(first.rate) == 1.0
    with small_experiment("dynafed", tiny(label_init=2.0), model=plain_network).engine_closed() as experiment:
        assert refiner_of(experiment)._first_samples().logits.argmax(1).tolist() == list(range(10))


@pytest.mark.parametrize("target", ["last", "two", "several"])
def test_segments_lie_on_the_trajectory(target: str) -> None:
    options = tiny(L=7, s=3, target=target)
    with small_experiment("dynafed", options, model=plain_network).engine_closed() as experiment:
        refiner, size = refiner_of(experiment), experiment.layout.size
        # Rows that hold powers of 4: the digits of a sum then tell which were in it, and how often.
        refiner.trajectory = [torch.full((size,), float(4**place)) for place in range(7)]
        starts, counts = set(), set()
        for n in range(200):
            t, goal = refiner.segment(n)
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
    with small_experiment("dynafed", options, model=plain_network).engine_closed() as experiment:
        steps = refiner_of(experiment).inner_steps(0)
        indices = [step.index for step in steps]
        assert [len(i) for i in indices if i is not None] == [6, 6, 6, 2] * 2
        passes = [torch.cat([i for i in part if i is not None]) for part in (indices[:4], indices[4:])]
        assert all(sorted(p.tolist()) == list(range(20)) for p in passes)
        assert not torch.equal(*passes)
        again = refiner_of(experiment).inner_steps(0)
        assert all(torch.equal(a.index, b.index) for a, b in zip(steps, again, strict=True))  # type: ignore[arg-type]
    with small_experiment("dynafed", tiny(), model=plain_network).engine_closed() as experiment:
        assert [step.index for step in refiner_of(experiment).inner_steps(0)] == [None, None]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_matching_loss_falls(optimizer: str) -> None:
    rates = {"adam": {}, "sgd": {"image_lr": 20.0, "label_lr": 20.0, "rate_lr": 0.0}}[optimizer]
    options = tiny(L=4, s=2, iterations=40, inner_steps=5, inner_lr=5.0, optimizer=optimizer, **rates)
    with small_experiment("dynafed", options, model=plain_network, epochs=3).engine_closed() as experiment:
        for round in range(4):
            experiment.rounds.play(round)
        losses, rate = refiner_of(experiment).losses, refiner_of(experiment).rate
        assert losses is not None
        assert rate is not None
        assert losses[-10:].mean() < 0.9 * losses[:3].mean()
        assert losses[-10:].mean() < 0.9
        assert (float(rate) == 5.0) == (optimizer == "sgd"), "rate_lr = 0 leaves the inner rate alone"


def test_checkpointing_changes_memory_and_nothing_else() -> None:
    made = []
    for checkpoint in (True, False):
        options = tiny(checkpoint=checkpoint, iterations=3, inner_steps=4)
        with small_experiment("dynafed", options, model=plain_network).engine_closed() as experiment:
            for round in range(2):
                experiment.rounds.play(round)
            made.append(_samples(refiner_of(experiment)))
    for one, two in zip(made[0].tensors(), made[1].tensors(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_samples_that_are_not_finite_end_the_run() -> None:
    with pytest.raises(FedloomError, match=r"diverged within 2 iterations.*Lower dynafed\.inner_lr"):
        small_run("dynafed", tiny(inner_lr=1e30), model=plain_network)
    with pytest.raises(FedloomError, match=r"round 3: a model is not finite.*lower dynafed\.refine_lr"):
        small_run("dynafed", tiny(refine_lr=3e37, refine_epochs=40), model=plain_network)


# Fine-tuning


def test_fine_tuning_is_training_on_the_soft_labels() -> None:
    """One batch, by hand with torch's own Adam on the module."""
    options = tiny(refine_batch=0, refine_epochs=3, augment="none")
    with small_experiment("dynafed", options, model=plain_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.play(round)
        refiner, layout = refiner_of(experiment), experiment.layout
        data, row = _samples(refiner), experiment.rounds.parts.server.deploy().clone()
        module = plain_network()
        module.load_state_dict(layout.state_dict(row))
        adam = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(3):
            loss = nn.functional.cross_entropy(module(data.images), data.logits.softmax(1)) / 10
            adam.zero_grad()
            loss.backward()
            adam.step()
        refiner.fine_tune(7, 0, row)
        for name, tensor in layout.state_dict(row).items():
            torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_every_fine_tuning_begins_with_a_new_optimiser() -> None:
    with small_experiment("dynafed", tiny(refine_batch=4), model=plain_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.play(round)
        rows = [experiment.rounds.parts.server.deploy().clone() for _ in range(3)]
        for row, slot in zip(rows, (0, 1, 0), strict=True):
            refiner_of(experiment).fine_tune(5, slot, row)
        assert digest(rows[0]) == digest(rows[2]), "nothing is left over from the models before"
        assert digest(rows[0]) != digest(rows[1]), "each has batches of its own"


def test_batch_norm_keeps_the_statistics_that_were_averaged() -> None:
    with small_experiment("dynafed", tiny()).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.play(round)
        refiner, layout = refiner_of(experiment), experiment.layout
        assert any(entry.kind is Kind.BUFFER for entry in layout.entries)
        row = experiment.rounds.parts.server.deploy().clone()
        before = row.clone()
        refiner.fine_tune(5, 0, row)
        assert torch.equal(row[layout.trainable :].view(torch.int32), before[layout.trainable :].view(torch.int32))
        assert not torch.equal(row[: layout.trainable], before[: layout.trainable])


def test_fine_tuning_lowers_the_loss_on_the_synthetic_samples() -> None:
    options = tiny(refine_epochs=30, label_init=5.0, augment="none")
    with small_experiment("dynafed", options, model=normed_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.play(round)
        refiner, row = refiner_of(experiment), experiment.rounds.parts.server.deploy().clone()
        data, module = _samples(refiner), normed_network().eval()
        losses = []
        for _ in range(2):
            module.load_state_dict(experiment.layout.state_dict(row))
            losses.append(float(nn.functional.cross_entropy(module(data.images), data.logits.softmax(1)).detach()))
            refiner.fine_tune(5, 0, row)
        assert losses[1] < 0.8 * losses[0]


# Exactness and company


@pytest.mark.parametrize("title", CHECKS)
def test_conformance_where_it_synthesises_and_refines(title: str) -> None:
    """Vectors, batch norm, lost clients, resuming before and after the synthesis, all engines."""
    CHECKS[title]("dynafed", tiny())


@pytest.mark.parametrize("name", ["fedcross", "fedmr", "fedcda", "scaffold", "indep"])
def test_it_refines_every_model_of_every_server(name: str) -> None:
    options = tiny()
    with small_experiment(f"{name}+dynafed", options, model=plain_network).engine_closed() as experiment:
        rounds, refiner, server = experiment.rounds, refiner_of(experiment), experiment.rounds.parts.server
        calls: list[tuple[int, str]] = []
        tune = refiner.fine_tune

        def spied(round: int, slot: int, row: Tensor) -> None:
            before = digest(row)
            tune(round, slot, row)
            assert digest(row) != before
            assert row.data_ptr() == server.models()[slot].data_ptr(), "in place"
            calls.append((slot, digest(row)))

        refiner.fine_tune = spied  # type: ignore[method-assign]
        for round in range(4):
            rounds.play(round)
        count = len(server.models())
        assert [slot for slot, _ in calls] == list(range(count)) * 2
        assert [row for _, row in calls[-count:]] == [digest(row) for row in server.models()]
        assert experiment.layout.is_finite(server.deploy())


@pytest.mark.parametrize("name", ["fedcross+dynafed", "fedcda+dynafed", "scaffold+dynafed"])
def test_it_resumes_exactly_in_company(name: str) -> None:
    options = {**tiny(), **({"fedcda": {"warmup": 1}} if "fedcda" in name else {})}
    CHECKS["resumes exactly"](name, options)


def test_two_refiners_are_refused() -> None:
    with pytest.raises(InputError, match="twice"):
        compose("dynafed+dynafed")
    assert compose("fedmr+fedprox+dynafed").owner("refiner").name == "dynafed"  # type: ignore[union-attr]


class Interrupted(Silent):
    """Pulls the plug in the middle of the synthesis."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def work(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))
        if done == 3:
            raise KeyboardInterrupt


def test_a_run_killed_in_the_synthesis_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Images, augmentation and batches too; and the other engine, for it must not matter."""
    settings = images(iterations=5, inner_batch=6, refine_batch=4)
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **settings)
    watcher = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("dynafed", out=tmp_path / "cut", watcher=watcher, checkpoint_seconds=0, **settings)
    assert watcher.told == [("synthesis", n, 5) for n in range(4)]
    assert not (tmp_path / "cut" / "synthetic.safetensors").exists()
    resumed = fedloom.resume(tmp_path / "cut", model=convolutions, report=False, engine="host", workers=2)
    assert resumed.digest == whole.digest
    files = [(run.path / "synthetic.safetensors").read_bytes() for run in (whole, resumed)]
    assert files[0] == files[1]


def test_the_samples_lie_in_the_folder_and_in_the_report(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(iterations=3), "report": True})
    made = read_tensors(tmp_path / "run" / "synthetic.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "images": (10, 1, 8, 8),
        "labels": (10, 10),
        "rate": (),
        "losses": (3,),
        "mean": (1,),
        "std": (1,),
    }
    torch.testing.assert_close(made["labels"].sum(1), torch.ones(10))
    assert np.isfinite(run.history[2]["diagnostics"]["refiner.matching loss"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Synthetic samples" in page
    assert page.count("data:image/png;base64,") >= 10


@pytest.mark.parametrize(("at_once", "rounds", "told"), [(False, 3, True), (False, 4, False), (True, 3, False)])
def test_a_run_too_short_for_it_is_told_so(at_once: bool, rounds: int, told: bool) -> None:
    with small_experiment(
        "dynafed", tiny(L=3, at_once=at_once), model=plain_network, rounds=rounds
    ).engine_closed() as e:
        assert bool(e.notes) == told
        assert all("refines from round 4 on (dynafed.L is 3), and this run has 3" in note for note in e.notes)
    equal = small_run("dynafed", tiny(L=3, at_once=at_once), rounds=rounds, model=plain_network).digest
    assert (equal == small_run("fedavg", {}, rounds=rounds, model=plain_network).digest) == told


def test_nothing_is_shown_before_there_is_something_to_show(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(L=20, s=5), "report": True})
    assert not (tmp_path / "run" / "synthetic.safetensors").exists()
    assert "Synthetic samples" not in (run.path / "report.html").read_text()


# What it refuses


class Words(nn.Module):
    """Takes numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.long().clamp(0, 49)).mean(1))


class Hot(nn.Module):
    """Takes numbers of tokens, without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.one_hot(x[:, 0].long().clamp(0, 2), 3).float())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Words, "an embedding.*text cannot be synthesised"),
        (Hot, "real-valued inputs with second derivatives.*not have been used"),
        (lambda: nn.Sequential(nn.Linear(64, 10), nn.Unflatten(1, (10, 1))), r"output has the shape \(2, 10, 1\)"),
    ],
)
def test_networks_it_cannot_work_with_are_refused(network: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_experiment("dynafed", {}, model=network)


def test_data_without_classes_is_refused(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 40, dtype=np.float32).reshape(20, 2)
    federation = fedloom.Federation.from_arrays([(x, x[:, :1]), (x, x[:, :1])])
    with pytest.raises(InputError, match="needs data with classes"):
        fedloom.run("dynafed", federation, lambda: nn.Linear(2, 1), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s": 20}, "s must be below L: of 20 models none has another 20"),
        ({"L": 1}, "L must be"),
        ({"augment": "blur"}, "augment must be none, dsa, or some of color.*not 'blur'"),
        ({"target": "first"}, "target"),
        ({"images_per_class": 0}, "images_per_class"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compose("dynafed", {"dynafed": options})


def test_defaults_are_the_papers_where_it_gives_them() -> None:
    options = DynaFedOptions()
    assert (options.L, options.s, options.target, options.initial, options.at_once) == (20, 5, "two", True, False)
    assert options.images_per_class * 10 == 150
    assert options.label_init == 0


def test_what_is_no_image_is_not_augmented() -> None:
    with small_experiment("dynafed", tiny(), model=plain_network).engine_closed() as experiment:
        assert all(step.change is None for step in refiner_of(experiment).inner_steps(0))


def test_a_zero_inner_rate_has_matching_loss_one_throughout() -> None:
    options = tiny(inner_lr=0.0, rate_lr=0.0, iterations=4)
    with small_experiment("dynafed", options, model=plain_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.play(round)
        refiner = refiner_of(experiment)
        assert refiner.losses is not None
        assert refiner.losses.tolist() == [1.0] * 4
        found = match(
            refiner._network,
            _samples(refiner),
            refiner.inner_steps(0),
            experiment.rounds.context.initial,
            torch.ones(1),
        )
        assert float(found.loss) == 1.0


def test_conformance_in_company() -> None:
    check_method("fedmr+fedprox+dynafed", tiny())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_an_iteration_on_a_gpu_does_not_wait_for_it(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(inner_batch=6), "device": "cuda"})
    assert np.isfinite(run.summary["loss"])
    options = tiny(L=4, inner_steps=8, inner_batch=6)
    with small_experiment("dynafed", options, model=plain_network, device="cuda").engine_closed() as experiment:
        for round in range(3):
            experiment.rounds.play(round)
        refiner = refiner_of(experiment)
        data = refiner._first_samples()
        assert all(tensor.is_cuda for tensor in (*data.tensors(), *refiner.trajectory))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n in range(3):
                t, target = refiner.segment(n)
                match(refiner._network, data, refiner.inner_steps(n), refiner.trajectory[t], target)
        finally:
            torch.cuda.set_sync_debug_mode("default")
