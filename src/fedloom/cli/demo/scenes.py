"""The scenes of the demo, as data.

The settings were settled on other seeds than those shown (docs/demo.md).
"""

from fedloom.cli.demo.scene import DemoClaim, DemoFinding, DemoScene, StartModel

MODELS = DemoScene(
    title="FedCross and FedMR: several models instead of one",
    claims=(
        DemoClaim(
            paper="FedCross",
            text="Hu et al., ICDE 2024: after enough rounds, mixing K models overtakes FedAvg on skewed data.",
            row="fedcross",
            baseline="fedavg",
            measures=("accuracy",),
            findings=(
                DemoFinding("indep", "fedavg", "; indep, which never mixes its models, has {gain}"),
                DemoFinding("fedcross", "indep", ", so mixing adds {gain}"),
                DemoFinding("fedcross:lr=0.03", "fedavg:lr=0.03", "; {outcome} at lr=0.03, {gain} against fedavg"),
                DemoFinding("fedcross:lr=0.03", "indep:lr=0.03", " and {gain} against indep"),
            ),
        ),
        DemoClaim(
            paper="FedMR",
            text="Hu et al., KDD 2024: after enough rounds, recombining the layers of K models overtakes FedAvg.",
            row="fedmr",
            baseline="fedavg",
            measures=("accuracy",),
            findings=(
                DemoFinding("indep", "fedavg", "; indep has {gain}"),
                DemoFinding("fedmr", "indep", ", so recombining adds {gain}"),
                DemoFinding("fedmr:lr=0.03", "fedavg:lr=0.03", "; {outcome} at lr=0.03, {gain} against fedavg"),
                DemoFinding("fedmr:lr=0.03", "indep:lr=0.03", " and {gain} against indep"),
            ),
        ),
    ),
    rows={"fedavg": 3.1, "fedcross": 3.1, "fedmr": 3.1, "indep": 3.1}
    | {"fedavg:lr=0.03": 3.1, "fedcross:lr=0.03": 3.1, "fedmr:lr=0.03": 3.1, "indep:lr=0.03": 3.1},
    settings={
        "data": "hard-digits",
        "partition": "dirichlet-equal:0.05",
        "clients": 40,
        "clients_per_round": 4,
        "model": "mlp",
        "epochs": 5,
        "lr": 0.01,
        "momentum": 0.5,
        "rounds": 120,
        "eval_every": 3,
        "device": "cpu",
    },
)

STABILITY = DemoScene(
    title="FedCDA: the models of all clients, chosen across rounds",
    claims=(
        DemoClaim(
            paper="FedCDA",
            text="Wang et al., ICLR 2024: accuracy varies less from round to round than FedAvg's, and is higher.",
            row="fedcda",
            baseline="fedavg",
            measures=("spread", "accuracy"),
            findings=(
                DemoFinding(
                    "fedcda:selection=newest", "fedavg", "; selection=newest, which chooses nothing, has {gain}"
                ),
                DemoFinding("fedcda", "fedcda:selection=newest", ", so choosing adds {gain}"),
                DemoFinding("fedcda:lr=0.03", "fedavg:lr=0.03", "; {outcome} at lr=0.03, {gain} against fedavg"),
            ),
        ),
    ),
    rows={"fedavg": 1.8, "fedcda": 1.8, "fedcda:selection=newest": 1.8, "fedavg:lr=0.03": 1.8, "fedcda:lr=0.03": 1.8},
    settings={
        "data": "hard-digits",
        "partition": "dirichlet-equal:0.05",
        "clients": 20,
        "clients_per_round": 4,
        "model": "mlp",
        "epochs": 5,
        "lr": 0.01,
        "momentum": 0.5,
        "rounds": 40,
        "device": "cpu",
    },
    options={"fedcda": {"warmup": 20}},
    seeds=4,
)

FEW_ROUNDS = DemoScene(
    title="LSS: few rounds from a pretrained start",
    claims=(
        DemoClaim(
            paper="LSS",
            text="Chen et al., NeurIPS 2024: from a pretrained start, a soup of client models is ahead of FedAvg after "
            "one or two rounds.",
            row="lss",
            baseline="fedavg",
            measures=("first", "accuracy"),
            findings=(
                DemoFinding("swa", "fedavg", "; swa, which averages one training, has {gain}"),
                DemoFinding("fedavg", "fedavg:init=none", "; the start gives fedavg {gain}"),
            ),
        ),
    ),
    rows={"fedavg": 0.7, "fedavg:init=none": 0.7, "swa": 0.7, "lss": 3.0},
    settings={
        "data": "hard-digits",
        "classes": "5-9",
        "partition": "dirichlet-equal:0.2",
        "clients": 5,
        "model": "lenet:padding=2",
        "epochs": 8,
        "batch_size": 32,
        "optimizer": "adam",
        "lr": 0.001,
        "rounds": 2,
        "device": "cpu",
    },
    seeds=4,
    start=StartModel(
        "start",
        {
            "data": "hard-digits",
            "classes": "0-4",
            "clients": 1,
            "model": "lenet:padding=2",
            "epochs": 1,
            "batch_size": 64,
            "momentum": 0.9,
            "lr_schedule": "cosine",
            "rounds": 10,
            "device": "cpu",
        },
    ),
)

SYNTHESIS = DemoScene(
    title="DynaFed: data synthesized from the first global models",
    claims=(
        DemoClaim(
            paper="DynaFed",
            text="Pi et al., CVPR 2023: at extreme skew, accuracy jumps after the synthesis and stays higher.",
            row="dynafed",
            baseline="fedavg",
            measures=("jump", "accuracy"),
            findings=(
                DemoFinding("dynafed:iterations=0", "fedavg", "; fine-tuning on noise (iterations=0) has {gain}"),
                DemoFinding("dynafed", "fedavg:lr=0.01", "; {outcome} against fedavg:lr=0.01, {gain}", ("accuracy",)),
            ),
        ),
    ),
    rows={"fedavg": 1.4, "dynafed": 9.4, "dynafed:iterations=0": 1.7, "fedavg:lr=0.01": 1.4},
    settings={
        "data": "hard-digits",
        "partition": "dirichlet-equal:0.02",
        "clients": 40,
        "clients_per_round": 16,
        "model": "mlp-128",
        "epochs": 1,
        "batch_size": 32,
        "optimizer": "adam",
        "lr": 0.001,
        "rounds": 40,
        "device": "cpu",
    },
    options={
        "dynafed": {
            "iterations": 200,
            "images_per_class": 5,
            "label_init": 3,
            "inner_lr": 2,
            "refine_lr": 0.0003,
        }
    },
    seeds=4,
    jump_round=20,
)

DEMO_SCENES = (MODELS, STABILITY, FEW_ROUNDS, SYNTHESIS)
