"""One's own arrays, network and loss, from Python: a regression over sites that each see another range of x.

Run it with `python examples/own_data.py`; it takes some seconds.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom


def measurements(rng: np.random.Generator, low: float, high: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy values of a curve between `low` and `high`; one in twenty is grossly wrong."""
    x = rng.uniform(low, high, (count, 1)).astype(np.float32)
    y = np.sin(3 * x) + 0.1 * rng.standard_normal((count, 1))
    y[rng.random(count) < 0.05] += 5
    return x, y.astype(np.float32)


def make_federation(sites: int = 12) -> fedloom.FederatedDataset:
    """Each site has its own stretch of x and its own number of measurements; the test set covers all of it."""
    rng = np.random.default_rng(0)
    edges = np.linspace(-1, 1, sites + 1)
    clients = [measurements(rng, edges[k], edges[k + 1], int(rng.integers(20, 60))) for k in range(sites)]
    x = np.linspace(-1, 1, 400, dtype=np.float32).reshape(-1, 1)
    return fedloom.FederatedDataset.from_arrays(clients, test=(x, np.sin(3 * x)), name="curve")


def make_network() -> nn.Module:
    """A function without arguments: its weights are drawn from the run's seed."""
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def robust(output: Tensor, target: Tensor) -> Tensor:
    """A loss: the mean over the batch, as one number. Huber's forgives measurements that are far off."""
    return F.huber_loss(output, target, delta=0.3)


def main(rounds: int = 100) -> fedloom.ComparisonResult:
    compared = fedloom.compare(
        ["fedavg", "scaffold"],
        data=make_federation(),
        model=make_network,
        loss=robust,
        rounds=rounds,
        clients_per_round=6,
        lr=0.3,
        epochs=5,
    )
    for run in compared.runs:
        print(f"{run.config.method:<10}loss {run.history[0]['loss']:.4f} before, {run.summary['last_loss']:.4f} after")
    with torch.no_grad():
        guess = compared.runs[-1].model()(torch.tensor([[0.5]]))
    print(f"scaffold says {guess.item():.2f} at x = 0.5; the curve is at {np.sin(1.5):.2f}")
    print(f"report: {compared.path / 'report.html'}")
    return compared


if __name__ == "__main__":
    main()
