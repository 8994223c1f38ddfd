"""The plain engine on a GPU. Run with `pytest -m gpu` where there is one."""

import pytest
import torch

from fedloom.errors import FedloomError
from fedloom.testing import CHECKS, small_experiment, small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_the_same_seed_gives_the_same_bits(method: str) -> None:
    assert small_run(method, {}, device="cuda").digest == small_run(method, {}, device="cuda").digest


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_a_round_agrees_with_the_cpu(method: str) -> None:
    rows = []
    for device in ("cpu", "cuda"):
        with small_experiment(method, {}, device=device, engine="plain").engine_closed() as experiment:
            experiment.rounds.play(0)
            rows.append(experiment.rounds.parts.server.deploy()[: experiment.layout.floats].cpu())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)


def test_it_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("fedloom.testing").testing.SETTINGS, "device", "cuda")
    CHECKS["resumes exactly"]("scaffold", {})


def test_convolutions_give_the_same_bits_twice(tmp_path) -> None:
    import fedloom

    digests = [
        fedloom.run("fedavg", "digits", "cnn", rounds=3, device="cuda", out=tmp_path / str(number), report=False).digest
        for number in range(2)
    ]
    assert digests[0] == digests[1]


def test_workers_are_not_forked_from_a_process_that_has_trained_beside_a_gpu() -> None:
    torch.zeros((), device="cuda", requires_grad=True).backward()
    with (
        small_experiment("fedavg", {}, engine="host").engine_closed() as host,
        pytest.raises(FedloomError, match="use the plain engine"),
    ):
        host.rounds.play(0)
