"""The tasks of the league (league.py), and its lines: every method with its options, and where these are from.

Hyper-parameters were fixed before the first run and are not tuned on any result. They are those of the papers and of
their authors' code, each named below. Where there are several, the one for the data nearest to ours is taken: MNIST
before EMNIST and FEMNIST, these before CIFAR-10.
"""

from dataclasses import dataclass, field
from typing import Any

Options = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A data set, and the budget that every method has on it."""

    data: str
    settings: dict[str, Any]
    samples: int | None = None
    """How many of the training samples are used, drawn by the seed; None: all. A twentieth of them is the server's."""


COMMON: dict[str, Any] = {
    "model": "mlp-128",
    "per_round": 10,
    "rounds": 24,
    "epochs": 2,
    "eval_every": 3,
    "engine": "plain",
}
"""The network is DynaFed's MLP; FedMA and GAMF were made for such. Two epochs can be shared out between two models, and
24 rounds hold eight passes of FedMA over its layers."""
SLOW = ("fedgen", "fedgen 0.2", "feddf", "dynafed", "gamf")
"""Lines that come last, because they take five times as long as FedAvg or more; GAMF matches for a second a round."""
TASKS = (
    # fedloom's own defaults for the digits.
    Task("digits", {"clients": 20, "batch_size": 20, "lr": 0.05}),
    # Plain SGD at 0.1 is from FedCDA's second setting, batches of 50 from FedCross; without weight decay, so that
    # SCAFFOLD's option II is exact.
    Task("fashion-mnist", {"clients": 50, "batch_size": 50, "lr": 0.1}, samples=10_000),
)
PARTITIONS = ("dirichlet:0.1", "dirichlet:0.5", "shards:2")


@dataclass(frozen=True)
class Row:
    """A line of the table: a method with its options, and where these are from."""

    name: str
    method: str
    source: str
    options: Options = field(default_factory=dict)


def rows(task: Task) -> list[Row]:
    """All lines of the table. Methods that train several models, or parts of one, share the epochs among them."""
    E, turns = COMMON["epochs"], task.settings["clients"] // COMMON["per_round"]
    pool = {"models": E, "epochs": 1}
    synthesis = {"L": 10, "iterations": 200, "images_per_class": 5, "label_init": 3.0, "inner_lr": 2.0}
    synthesis |= {"refine_lr": 0.001, "checkpoint": False}
    return [
        Row("fedavg", "fedavg", "the paper: mean by samples"),
        Row("fedavg uniform", "fedavg", "as in DynaFed and FedCDA", {"fedavg": {"weighting": "uniform"}}),
        Row("fedprox", "fedprox", "mu 0.1, FedCross and FedMR for FEMNIST", {"fedprox": {"mu": 0.1}}),
        Row("scaffold II", "scaffold", "the paper: option II, global step 1"),
        Row("scaffold I", "scaffold", "the paper: option I", {"scaffold": {"option": "I"}}),
        Row("feddyn", "feddyn", "alpha 0.01, the authors' example"),
        Row("fedexp", "fedexp", "epsilon 0.1, the authors for EMNIST", {"fedexp": {"epsilon": 0.1}}),
        Row("fedsam", "fedsam", "rho 0.1, Caldarola et al. for CIFAR-10"),
        Row("fedasam", "fedasam", "rho 0.7, eta 0.2, the authors for CIFAR-10"),
        Row(
            "fedasam-swa",
            "fedasam-swa",
            "the same, from 75 % of the rounds; two cycles of 3 rounds, where the authors have 10",
            {"fedasam-swa": {"cycle": 3}},
        ),
        Row("fedmut", "fedmut", "alpha 4, a0 0.3, T_a 50, the authors' code"),
        Row("clusamp", "clusamp", "the paper: angles"),
        Row(
            "fedcluster",
            "fedcluster",
            "as many clusters as make a turn ask as many clients as a round of the others",
            {"fedcluster": {"clusters": turns}},
        ),
        Row("indep", "indep", "FedMR's baseline, no options"),
        Row("fedgen", "fedgen", "the authors for MNIST: alpha and beta 10, 50 steps"),
        Row(
            "feddf",
            "feddf",
            "the authors: Adam 1e-3, batches of 128; 200 steps, about FedBE's 20 epochs, in place of at most 10,000",
            {"feddf": {"steps": 200}},
        ),
        Row("fedbe gaussian", "fedbe", "the paper: 10 samples, 20 epochs, sharpened by 0.5"),
        Row("fedbe dirichlet", "fedbe", "the paper: alpha 1", {"fedbe": {"distribution": "dirichlet"}}),
        Row("abavg", "abavg", "by accuracy alone, as in DynaFed's code"),
        Row("fedlaw", "fedlaw", "the authors for CIFAR-10: Adam 0.01, 20 epochs"),
        Row("fedmix", "fedmix", "lambda 0.2, the paper for FEMNIST; one mean a client", {"fedmix": {"lam": 0.2}}),
        Row("naivemix", "naivemix", "the same", {"naivemix": {"lam": 0.2}}),
        Row("moon", "moon", "mu 5, tau 0.5, the authors for CIFAR-10"),
        Row("fedbn", "fedbn", "no options"),
        Row("fedfomo", "fedfomo", "M 5, epsilon 0.3 falling by 0.05, a fifth to validate, the authors"),
        Row(
            "fedrep",
            "fedrep",
            "the epochs shared: one for the body, as in the paper, the rest for the head; 10 on the head at the end",
            {"fedrep": {"head_epochs": E - 1, "body_epochs": 1}},
        ),
        Row("fedbabu", "fedbabu", "5 epochs of fine-tuning, the authors"),
        Row("swa", "swa", "4 snapshots (LSS's paper) in the last quarter (SWA's)"),
        Row("swad", "swad", "the authors: 3, 6, 1.3; a fifth to validate"),
        Row("soups uniform", "soups", "LSS's ranges; as many models as epochs, one epoch each", {"soups": pool}),
        Row("soups greedy", "soups", "the same; a fifth to validate", {"soups": {**pool, "selection": "greedy"}}),
        Row("diwa", "diwa", "the authors' ranges; as many models as epochs, one epoch each", {"diwa": pool}),
        Row("lss", "lss", "the paper: 4 members, coefficients 3; epochs shared among them", {"lss": {"share": True}}),
        Row("fedma", "fedma", "fixed size, all layers in every round, 5 sweeps"),
        Row("fedma-layers", "fedma-layers", "the paper's passes, fixed size"),
        Row(
            "fedma-layers growing",
            "fedma-layers",
            "the paper: sigma and sigma0 1, gamma 7; clients have half of the units, so that a layer may double",
            {"fedma-layers": {"start": 0.5}},
        ),
        Row("fedcross", "fedcross", "alpha 0.99, the least similar, the paper"),
        Row("fedmr", "fedmr", "no first stage, the paper for its CNN"),
        Row(
            "fedcda",
            "fedcda",
            "K 3, B 3, the paper; warm-up of a quarter of the rounds, as 50 of 200 there",
            {"fedcda": {"warmup": COMMON["rounds"] // 4}},
        ),
        Row("dynafed", "dynafed", "the small synthesis of docs/dynafed.md", {"dynafed": synthesis}),
        # Added when the first results were there, to explain two of them.
        Row(
            "fedgen 0.2",
            "fedgen",
            "alpha and beta 0.2, FedMR's code for CIFAR-10; added later, because the values for MNIST diverged",
            {"fedgen": {"alpha": 0.2, "beta": 0.2}},
        ),
        Row("lss x 4", "lss", "the paper: all epochs for each of 4 members, four times the work; added later"),
        Row("gamf", "gamf", "the authors: 50 sweeps, temperature 10, cooling 0.8; permutations at the end"),
    ]
