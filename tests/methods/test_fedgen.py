"""Tests of FedGen: the generator, its training, and equality with FedAvg."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.fedgen import FedGenGenerator, fedgen_diversity_loss, fedgen_generator_loss, fedgen_label_weights
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from fedloom.training.optimizers import Adam
from tests.support.task_rounds import in_round


def test_the_authors_generator_has_the_authors_size() -> None:
    layout = Layout.of(FedGenGenerator(32, 10, 256, 32, torch.float32))
    assert layout.trainable == 19_744
    assert layout.floats == layout.trainable + 2 * 256


def test_shares_of_an_owned_class_sum_to_one_and_nobodys_is_zero() -> None:
    a = fedgen_label_weights(torch.tensor([[3.0, 0.0, 5.0], [1.0, 0.0, 0.0]]))
    torch.testing.assert_close(a, torch.tensor([[0.75, 0.0, 1.0], [0.25, 0.0, 0.0]]))


def test_diversity_is_the_papers_and_one_where_all_is_the_same() -> None:
    noise, made = torch.rand(4, 3), torch.randn(4, 5)
    total = sum(
        float((noise[i] - noise[j]).square().mean() * (made[i] - made[j]).abs().mean())
        for i in range(4)
        for j in range(4)
    )
    torch.testing.assert_close(fedgen_diversity_loss(noise, made), torch.tensor(-total / 16).exp())
    assert fedgen_diversity_loss(noise, made[:1].expand(4, -1)) == 1.0


def test_the_loss_weighs_heads_by_who_owns_a_label() -> None:
    made, noise, y = torch.randn(6, 5), torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    heads = [{"weight": torch.randn(3, 5), "bias": torch.randn(3)} for _ in range(2)]
    counts = torch.tensor([[4.0, 0.0, 1.0], [0.0, 2.0, 3.0]])
    expected = fedgen_diversity_loss(noise, made)
    for head, a in zip(heads, ([1.0, 0.0, 0.25], [0.0, 1.0, 0.75]), strict=True):
        logits = made @ head["weight"].T + head["bias"]
        expected = expected + sum(
            a[int(label)] * F.cross_entropy(logits[i : i + 1], y[i : i + 1]) for i, label in enumerate(y)
        ) / len(y)
    torch.testing.assert_close(fedgen_generator_loss(made, noise, y, heads, counts), expected)


def test_the_first_round_is_fedavg_and_later_ones_are_not() -> None:
    assert small_run("fedgen", {}, rounds=1).digest == small_run("fedavg", {}, rounds=1).digest
    assert small_run("fedgen", {}, rounds=2).digest != small_run("fedavg", {}, rounds=2).digest


def test_without_its_two_terms_it_is_fedavg_for_ever() -> None:
    assert small_run("fedgen", {"fedgen": {"alpha": 0.0, "beta": 0.0}}).digest == small_run("fedavg", {}).digest
    for term in ("alpha", "beta"):
        assert small_run("fedgen", {"fedgen": {term: 0.0}}).digest != small_run("fedavg", {}).digest


def sent(experiment: BuiltRun, round: int, client: int) -> ClientUpdate:
    companion = experiment.rounds.parts.extras
    (job,) = experiment.rounds.parts.server.dispatch(round, [client])
    (update,) = experiment.engine.train(
        in_round(round, [ClientTask(job.client_id, job.row, job.model_index, companion.send_to_client(round, client))])
    )
    assert isinstance(update, ClientUpdate), update
    return update


def test_clients_count_the_labels_of_their_steps() -> None:
    with build_small_run("fedgen", {}, epochs=2).engine_closed() as experiment:
        counts = torch.bincount(experiment.data.federated_data.client_samples(2).y, minlength=10)
        assert torch.equal(sent(experiment, 0, 2).extras["labels"], 2.0 * counts)


def test_the_generator_travels_once_it_has_learned_and_is_counted() -> None:
    with build_small_run("fedgen", {}).engine_closed() as experiment:
        first, second = (experiment.rounds.run_round(number) for number in range(2))
        row = experiment.rounds.parts.extras.row
        assert first["bytes_down"] == 4 * experiment.layout.nbytes
        assert second["bytes_down"] == 4 * (experiment.layout.nbytes + row.nbytes)
        assert first["bytes_up"] == 4 * (experiment.layout.nbytes + 4 * 10)


def test_the_generator_learns_what_the_heads_know() -> None:
    with build_small_run("fedgen", {"fedgen": {"steps": 300, "lr": 3e-3}}).engine_closed() as experiment:
        companion = experiment.rounds.parts.extras
        experiment.rounds.run_round(0)
        y, noise = torch.arange(10).repeat(20), torch.rand(200, 32)
        generator = companion._generator.eval()
        made = generator.at(companion.row, companion.row, noise, y)
        module = experiment.rounds.context.make_model()
        experiment.layout.bind(module, experiment.rounds.parts.server.global_model())
        assert float((module[-1](made).argmax(1) == y).float().mean()) > 0.8


def test_heads_stand_still_while_the_generator_learns() -> None:
    with build_small_run("fedgen", {}).engine_closed() as experiment:
        companion, server = experiment.rounds.parts.extras, experiment.rounds.parts.server
        jobs = list(server.dispatch(0, [0, 1, 2]))
        for update in experiment.engine.train(in_round(0, jobs)):
            companion.receive_update(0, update)
        heads = [tensor for head in companion._heads for tensor in head.values()]
        before, generator, model = [h.clone() for h in heads], companion.row.clone(), server.global_model().clone()
        companion.end_round(0)
        assert not torch.equal(companion.row, generator)
        assert all(torch.equal(head, old) for head, old in zip(heads, before, strict=True))
        assert torch.equal(server.global_model(), model)


def test_labels_that_nobody_saw_twice_are_not_generated_and_nothing_breaks() -> None:
    with build_small_run("fedgen", {}).engine_closed() as experiment:
        companion, layout = experiment.rounds.parts.extras, experiment.layout
        before, drawn = companion.row.clone(), []
        plain = companion._generator.lesson

        def note(row: Tensor, noise: Tensor, y: Tensor, *given: object) -> tuple[float, Tensor]:
            drawn.extend(y.tolist())
            return plain(row, noise, y, *given)

        companion._generator.lesson = note

        def answer(labels: list[float]) -> None:
            row = experiment.rounds.context.initial.clone()
            companion.receive_update(
                0, ClientUpdate(ClientTask(0, row), row, 5, 1.0, 1, {"labels": torch.tensor(labels)})
            )
            companion.end_round(0)

        answer([1.0] * 10)
        assert torch.equal(companion.row, before), "nothing to learn from"
        assert companion.send_to_client(1, 0) == {}
        answer([0.0, 3.0, 1.0, 0.0, 2.0, *[0.0] * 5])
        assert set(drawn) == {1, 4}
        assert torch.isfinite(companion.row).all()
        assert layout.is_finite(experiment.rounds.parts.server.global_model())
        assert list(companion.send_to_client(1, 0)) == ["generator"]


def test_clients_leave_the_generator_and_its_statistics_alone() -> None:
    with build_small_run("fedgen", {}).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        row = experiment.rounds.parts.extras.row
        before = row.clone()
        sent(experiment, 1, 2)
        assert torch.equal(row, before)
        local = experiment.rounds.parts.client.generator
        assert not local.training
        assert int(local.norm.num_batches_tracked) == 0


def test_noise_is_uniform_on_the_clients_as_on_the_server() -> None:
    with build_small_run("fedgen", {"fedgen": {"steps": 3}}).engine_closed() as experiment:
        local, companion = experiment.rounds.parts.client, experiment.rounds.parts.extras
        drawn: dict[str, list[Tensor]] = {"client": [], "server": []}
        at, lesson = local.generator.at, companion._generator.lesson
        local.generator.at = lambda a, b, noise, y: (drawn["client"].append(noise), at(a, b, noise, y))[1]
        companion._generator.lesson = lambda row, noise, *rest: (
            drawn["server"].append(noise),
            lesson(row, noise, *rest),
        )[1]
        for round in range(2):
            experiment.rounds.run_round(round)
    for noises in drawn.values():
        noise = torch.cat(noises)
        assert noise.shape[1] == 32
        assert 0 <= float(noise.min()) < 0.01
        assert 0.99 < float(noise.max()) < 1
        assert float(noise.mean()) == pytest.approx(0.5, abs=0.03)


def test_generated_representations_teach_the_head_and_not_the_rest() -> None:
    """With alpha alone and no samples' loss, only the head would move: the difference to FedAvg in one step."""
    rows = []
    for alpha in (0.0, 5.0):
        options = {"fedgen": {"alpha": alpha, "beta": 1e-30}}
        with build_small_run("fedgen", options, steps=1).engine_closed() as experiment:
            experiment.rounds.run_round(0)
            rows.append(sent(experiment, 1, 2).row.clone())
            layout = experiment.layout
    moved = {e.layer: bool((e.view(rows[0]) != e.view(rows[1])).any()) for e in layout.entries if e.layer != "1"}
    assert moved == {"0": False, "3": True}


def test_a_clients_step_follows_the_papers_loss_whose_weights_decay_by_the_round() -> None:
    """One step of plain SGD on all samples, against the three terms written out and differentiated as they are."""
    options = {"fedgen": {"alpha": 3.0, "beta": 0.8, "decay": 0.5}}
    given = {"steps": 1, "batch_size": 0, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    with build_small_run("fedgen", options, **given).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        local, module, layout = (
            experiment.rounds.parts.client,
            experiment.rounds.context.make_model(),
            experiment.layout,
        )
        step, generate, batches, made = local.training_step, local.generate, [], []
        local.training_step = lambda bench, batch: (batches.append(batch), step(bench, batch))[1]
        local.generate = lambda bench, y: (made.append((y.clone(), generate(bench, y))), made[-1][1])[1]
        received = experiment.rounds.parts.server.global_model().clone()
        row = sent(experiment, 2, 3).row.clone()
    ((x, y),) = [(batch.x, batch.y) for batch in batches]
    (any_y, any_z), (own_y, own_z) = made
    assert torch.equal(own_y, y)
    assert not torch.equal(any_y, y)
    assert set(any_y.tolist()) - set(y.tolist()), "labels that are not its own are taught too"
    layout.bind(module, received.clone())
    output = module.train()(x)
    target = F.softmax(F.linear(own_z, module[-1].weight, module[-1].bias), 1).detach()
    taught = F.cross_entropy(F.linear(any_z, module[-1].weight, module[-1].bias), any_y)
    distance = (target * (target.log() - F.log_softmax(output, 1))).sum(1).mean()
    fade = 0.5**2
    loss = F.cross_entropy(output, y) + fade * 3.0 * taught + fade * 0.8 * distance
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close((received - row)[: layout.trainable] / 0.1, gradient, rtol=1e-3, atol=1e-5)


def test_the_generator_learns_as_with_pytorchs_own_adam_whose_moments_last() -> None:
    """Three rounds of four steps, in training mode, with weight decay, against the module itself."""
    options = {"steps": 4, "lr": 0.02, "decay": 0.5, "weight_decay": 0.3, "noise": 5, "hidden": 6}
    with build_small_run("fedgen", {"fedgen": options}).engine_closed() as experiment:
        companion, lessons = experiment.rounds.parts.extras, []
        lesson = companion._generator.lesson
        companion._generator.lesson = lambda row, *given: (lessons.append(given), lesson(row, *given))[1]
        for round in range(3):
            experiment.rounds.run_round(round)
        ours = companion.row.clone()
        theirs = FedGenGenerator.fit(experiment.rounds.context, 5, 6).train()
    assert len(lessons) == 12
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.02, weight_decay=0.3)
    for number, (noise, y, heads, counts) in enumerate(lessons):
        optimizer.param_groups[0]["lr"] = 0.02 * 0.5 ** (number // 4)
        optimizer.zero_grad()
        fedgen_generator_loss(theirs(noise, y), noise, y, heads, counts).backward()
        optimizer.step()
    torch.testing.assert_close(ours, theirs.layout.read(theirs)[: len(ours)], rtol=1e-3, atol=1e-5)


def test_a_label_that_two_clients_saw_once_each_is_not_generated() -> None:
    with build_small_run("fedgen", {}).engine_closed() as experiment:
        companion, drawn = experiment.rounds.parts.extras, []
        lesson = companion._generator.lesson
        companion._generator.lesson = lambda row, noise, y, *given: (
            drawn.extend(y.tolist()),
            lesson(row, noise, y, *given),
        )[1]
        row = experiment.rounds.context.initial.clone()
        for client in range(2):
            labels = torch.tensor([1.0, 2.0 * client, *[0.0] * 8])
            companion.receive_update(0, ClientUpdate(ClientTask(client, row), row, 5, 1.0, 1, {"labels": labels}))
        companion.end_round(0)
    assert set(drawn) == {1}


def test_the_generators_rate_decays_by_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(Adam, "step", lambda self, weights, gradient, lr: rates.append(lr))
    with build_small_run("fedgen", {"fedgen": {"steps": 2, "lr": 0.4, "decay": 0.5}}).engine_closed() as experiment:
        for round in range(3):
            experiment.rounds.run_round(round)
    assert rates == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]


def test_classes_of_nobody_and_a_client_of_one_sample_are_no_trouble() -> None:
    federation = SmallFederatedDataset(sizes={0: 0, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1})
    finished = small_run("fedgen", {}, federated_data=federation, clients_per_round=8)
    assert not any(record["failed"] for record in finished.records)


def test_data_without_classes_are_refused() -> None:
    federation = SmallFederatedDataset()
    federation.classes = 0
    with pytest.raises(InputError, match="these data have none"):
        small_run("fedgen", {}, federated_data=federation)


@pytest.mark.parametrize("server", ["fedcross", "fedmr", "indep"])
def test_with_many_models_its_weights_are_small_unless_they_are_given(server: str) -> None:
    """With 10 the models drift apart, and their mean is worth nothing."""
    chosen = compose(f"{server}+fedgen").options["fedgen"]
    assert (chosen.alpha, chosen.beta) == (1.0, 1.0)
    given = compose(f"{server}+fedgen", {"fedgen": {"beta": 3.0}}).options["fedgen"]
    assert (given.alpha, given.beta) == (1.0, 3.0)
    alone = compose("fedgen").options["fedgen"]
    assert (alone.alpha, alone.beta) == (10.0, 10.0)
    assert "fedgen" not in compose(server).options
