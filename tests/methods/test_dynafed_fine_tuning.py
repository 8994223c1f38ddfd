"""Tests of DynaFed's fine-tuning against PyTorch, and of what it keeps."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.layout import TensorKind, model_digest
from fedloom.methods._support.trajectory_matching import TrajectoryStep
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network
from tests.support.small_dynafed import refiner_of, samples_of, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fine_tuning_is_training_on_the_soft_labels() -> None:
    """One batch, by hand with torch's own Adam on the module."""
    options = tiny(refine_batch=0, refine_epochs=3, augment="none")
    with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        refiner, layout = refiner_of(experiment), experiment.layout
        data, row = samples_of(refiner), experiment.rounds.parts.server.global_model().clone()
        module = simple_network()
        module.load_state_dict(layout.state_dict(row))
        adam = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(3):
            loss = nn.functional.cross_entropy(module(data.images), data.label_logits.softmax(1)) / 10
            adam.zero_grad()
            loss.backward()
            adam.step()
        refiner.fine_tune(7, 0, row)
        for name, tensor in layout.state_dict(row).items():
            torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_an_epoch_passes_over_all_samples_in_batches_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    plain = TrajectoryStep.take

    def noted(step: TrajectoryStep, images: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        assert step.sample_indices is not None
        taken.append(step.sample_indices.tolist())
        return plain(step, images, logits)

    options = tiny(refine_batch=4, refine_epochs=3)
    with build_small_run("dynafed", options, model=simple_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        monkeypatch.setattr(TrajectoryStep, "take", noted)
        refiner_of(experiment).fine_tune(7, 0, experiment.rounds.parts.server.global_model().clone())
    assert [len(batch) for batch in taken] == [4, 4, 2] * 3
    epochs = [[*taken[at], *taken[at + 1], *taken[at + 2]] for at in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_every_fine_tuning_begins_with_a_new_optimiser() -> None:
    with build_small_run("dynafed", tiny(refine_batch=4), model=simple_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        rows = [experiment.rounds.parts.server.global_model().clone() for _ in range(3)]
        for row, slot in zip(rows, (0, 1, 0), strict=True):
            refiner_of(experiment).fine_tune(5, slot, row)
        assert model_digest(rows[0]) == model_digest(rows[2]), "nothing is left over from the models before"
        assert model_digest(rows[0]) != model_digest(rows[1]), "each has batches of its own"


def test_batch_norm_keeps_the_statistics_that_were_averaged() -> None:
    with build_small_run("dynafed", tiny()).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        refiner, layout = refiner_of(experiment), experiment.layout
        assert any(entry.kind is TensorKind.BUFFER for entry in layout.entries)
        row = experiment.rounds.parts.server.global_model().clone()
        before = row.clone()
        refiner.fine_tune(5, 0, row)
        assert torch.equal(row[layout.trainable :].view(torch.int32), before[layout.trainable :].view(torch.int32))
        assert not torch.equal(row[: layout.trainable], before[: layout.trainable])


def test_fine_tuning_lowers_the_loss_on_the_synthetic_samples() -> None:
    options = tiny(refine_epochs=30, label_init=5.0, augment="none")
    with build_small_run("dynafed", options, model=batch_norm_network).engine_closed() as experiment:
        for round in range(2):
            experiment.rounds.run_round(round)
        refiner, row = refiner_of(experiment), experiment.rounds.parts.server.global_model().clone()
        data, module = samples_of(refiner), batch_norm_network().eval()
        losses = []
        for _ in range(2):
            module.load_state_dict(experiment.layout.state_dict(row))
            losses.append(
                float(nn.functional.cross_entropy(module(data.images), data.label_logits.softmax(1)).detach())
            )
            refiner.fine_tune(5, 0, row)
        assert losses[1] < 0.8 * losses[0]
