"""Variants: what is parsed, what is written is read again, names of folders, and what is refused."""

import re
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from fedloom import Client, Method, Options, register
from fedloom.config import Config
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.variants import (
    VARIANT_SETTINGS,
    parse_method_variant,
    split_variant_list,
    variant_folder_name,
)
from fedloom.testing import check_method


class OddOptions(Options):
    """Options of every kind; `lr` is a setting too."""

    text: str = "a"
    """a text"""
    maybe: str | None = None
    """a text or none"""
    lr: float = 1.0
    """a number"""
    flag: bool = False
    """yes or no"""
    count: int | None = 3
    """a whole number or none"""
    numbers: list[float] = Field([])
    """numbers"""
    words: list[str] = Field([])
    """texts"""


@pytest.fixture(autouse=True)
def odd() -> None:
    register(Method("odd", "a test", "nobody", options=OddOptions, client=Client))


def test_keys_are_options_first_and_settings_otherwise() -> None:
    variant = parse_method_variant("fedcross:alpha=0.9+odd:lr=2,run.lr=3e-2,momentum=.9")
    assert variant.name == "fedcross+odd"
    assert variant.options == {"fedcross": {"alpha": 0.9}, "odd": {"lr": 2.0}}
    assert variant.settings == {"lr": 0.03, "momentum": 0.9}
    assert variant.label == "fedcross:alpha=0.9+odd:lr=2,run.lr=0.03,momentum=0.9"
    assert parse_method_variant("fedprox:run.lr=1").label == "fedprox:lr=1"
    assert parse_method_variant("odd+fedcross:lr=0.5").label == "odd+fedcross:run.lr=0.5", "odd has an option lr"


@pytest.mark.parametrize("name", ["fedavg", "fedcross+fedprox", "no-such-method", "", "fedavg,fedprox"])
def test_a_plain_name_stays_as_it_is(name: str) -> None:
    variant = parse_method_variant(name)
    assert (variant.name, variant.options, variant.settings, variant.label) == (name, {}, {}, name)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fedavg:lr=1e+3", {"lr": 1000.0}),
        ("fedavg:model=lenet+projection,lr=1", {"model": "lenet+projection", "lr": 1.0}),
        ("fedavg:augment=crop+flip+fedcross", {"augment": "crop+flip"}),
        ("fedavg:augment=none,steps=none,clip=None", {"augment": "none", "steps": None, "clip": None}),
        ("fedavg:nesterov=yes,momentum=0.9,keep_optimizer=true", {"nesterov": True, "keep_optimizer": True}),
        ("fedavg:init=none", {"init": None}),
        ("fedavg:init=2024-01-02", {"init": "2024-01-02"}),
        ('fedavg:model="resnet18:norm=group,stem=imagenet",epochs=3', {"model": "resnet18:norm=group,stem=imagenet"}),
        ("fedavg:init='a+fedprox:mu=1,b'", {"init": "a+fedprox:mu=1,b"}),
    ],
)
def test_values_are_read_as_their_setting_takes_them(text: str, settings: dict[str, Any]) -> None:
    found = parse_method_variant(text).settings
    assert {key: found[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fedprox:", "are written NAME:KEY=VALUE"),
        ("fedprox:mu", "are written NAME:KEY=VALUE"),
        ("fedprox:mu=", "are written NAME:KEY=VALUE"),
        ("fedprox:=1", "are written NAME:KEY=VALUE"),
        ("fedprox:mu=1,", "are written NAME:KEY=VALUE"),
        ("fedprox:mu=1,2", "are written NAME:KEY=VALUE"),
        ("fedavg,fedprox:mu=1", "are written NAME:KEY=VALUE"),
        ("fedprx:mu=1", "unknown method 'fedprx'; did you mean 'fedprox'"),
        ("fedprox:mu=1+fedcros", "unknown method 'fedcros'; did you mean 'fedcross'"),
        ("fedcda:selction=newest", "unknown key 'selction' in .*; did you mean 'selection'"),
        ("fedprox:momentun=1", "unknown key 'momentun' in .*; did you mean 'momentum'"),
        ("fedprox:run.mu=1", "unknown key 'mu' in"),
        ("fedprox:zzz=1", "options of fedprox are: mu; settings are: epochs, .*lr, "),
        ("indep:zzz=1", "options of indep are: none; settings are"),
        ("fedprox:clients=5", "clients is no setting of a single method.*--clients"),
        ("fedprox:run.seed=5", "seed is no setting of a single method"),
        ("fedprox:variant=a", "unknown key 'variant'"),
        ("fedprox:mu=1,mu=2", "mu is given twice"),
        ("fedprox:lr=1,run.lr=1", "lr is given twice"),
        ("fedcross:lr=1+fedprox:lr=1", "lr is given twice"),
    ],
)
def test_a_wrong_variant_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_method_variant(text)


def test_no_setting_of_the_task_or_the_machine_is_one_of_a_variant() -> None:
    shared = {
        "data",
        "classes",
        "normalize",
        "partition",
        "client_test",
        "server_data",
        "clients",
        "seed",
        "eval_every",
    }
    shared |= {"engine", "device", "precision", "fast", "workers", "slots", "imports", "method", "options", "variant"}
    assert not shared & set(VARIANT_SETTINGS)
    assert set(VARIANT_SETTINGS) <= Config.model_fields.keys()


def test_compose_takes_options_and_refuses_settings() -> None:
    made = compose("fedcross:alpha=0.9+fedprox", {"fedcross": {"alpha": 0.5, "selection": "highest"}, "fedprox": {}})
    assert made.name == "fedcross+fedprox"
    assert made.resolved_options()["fedcross"]["alpha"] == 0.9
    assert made.resolved_options()["fedcross"]["selection"] == "highest"
    with pytest.raises(InputError, match="sets lr, a setting of a run"):
        compose("fedprox:lr=0.1")
    with pytest.raises(InputError, match=r"fedcda\.selection must be 'approximate', .*, not 'oldest'"):
        compose("fedcda:selection=oldest")


def test_the_checks_of_a_method_take_options_behind_its_name() -> None:
    with pytest.raises(InputError, match=r"fedprox\.mu must be greater"):
        check_method("fedprox:mu=-1")


def test_lists_are_split_between_variants_only() -> None:
    assert split_variant_list("fedavg, fedcross:alpha=0.9,selection=lowest,fedmr") == [
        "fedavg",
        "fedcross:alpha=0.9,selection=lowest",
        "fedmr",
    ]
    assert split_variant_list("diwa:lr_factors=[1, 0.5],lr=1+fedcross,sgd") == [
        "diwa:lr_factors=[1, 0.5],lr=1+fedcross",
        "sgd",
    ]


TEXTS = st.one_of(
    st.text(min_size=1, max_size=12),
    st.text("a1.,:+= \"'[]{}-/#", min_size=1, max_size=12),
    st.sampled_from(["none", "None", "true", "3", "v+fedprox", "v,lr=1", "crop+flip", "run.lr=1", "x.lr=1", "a-seed1"]),
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
OF_ODD = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "maybe": st.none() | TEXTS,
        "lr": NUMBERS,
        "flag": st.booleans(),
        "count": st.none() | st.integers(),
        "numbers": st.lists(NUMBERS, max_size=3),
        "words": st.lists(TEXTS, max_size=3),
    },
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(0, 1e6),
        "epochs": st.integers(0, 1000),
        "steps": st.none() | st.integers(0, 1000),
        "nesterov": st.booleans(),
        "model": TEXTS,
        "init": st.none() | TEXTS,
        "optimizer": st.sampled_from(["sgd", "adam"]),
    },
)
VARIANTS = st.tuples(st.sampled_from(["odd", "odd+fedcross", "fedcross+odd"]), OF_ODD, SETTINGS)


def written(name: str, options: dict[str, Any], settings: dict[str, Any]) -> str:
    """A variant as somebody may write it, with every string in quotes."""

    def toml(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(toml, value))}]"
        return "none" if value is None else tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")

    pairs = [f"{key}={toml(value)}" for key, value in options.items()]
    pairs += [f"run.{key}={toml(value)}" for key, value in settings.items()]
    return name.replace("odd", f"odd:{','.join(pairs)}" if pairs else "odd")


@given(VARIANTS)
def test_the_label_is_read_as_the_same_variant(variant: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    name, options, settings = variant
    first = parse_method_variant(written(*variant))
    assert (first.name, first.settings) == (name, settings)
    assert first.options.get("odd", {}) == options
    assert parse_method_variant(first.label) == first
    assert split_variant_list(f"{first.label},fedavg") == [first.label, "fedavg"]


@given(st.lists(VARIANTS, min_size=2, max_size=8))
def test_different_variants_have_folders_of_different_names(
    variants: list[tuple[str, dict[str, Any], dict[str, Any]]],
) -> None:
    labels = {parse_method_variant(written(*variant)).label for variant in variants}
    folders = {variant_folder_name(label) for label in labels}
    assert len(folders) == len(labels)
    assert all(re.fullmatch(r"[A-Za-z0-9._=+-]{1,140}", folder) for folder in folders)


SHORT = st.text(".,:+=-_1are", min_size=1, max_size=9)


@given(st.lists(SHORT, min_size=2, max_size=60, unique=True))
def test_values_that_look_like_the_form_get_folders_of_their_own(values: list[str]) -> None:
    labels = {parse_method_variant(written("odd", {"text": value}, {})).label for value in values}
    labels |= {parse_method_variant(written("odd", {"text": value}, {"lr": 1.0})).label for value in values}
    assert len({variant_folder_name(label) for label in labels}) == len(labels) == 2 * len(values)


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("fedcross+fedprox", "fedcross+fedprox"),
        ("fedcross:alpha=0.9", "fedcross.alpha=0.9"),
        ("fedcross:alpha=0.9+fedprox:mu=0.1,lr=1e-05", "fedcross.alpha=0.9+fedprox.mu=0.1.lr=1e-05"),
        ("fedavg:model=lenet+projection", "fedavg.model=lenet+projection"),
        ("odd:run.lr=1", "odd.run.lr=1"),
        ("odd:text=in_order", "odd.text=in_order"),
    ],
)
def test_folders_are_readable(text: str, folder: str) -> None:
    assert variant_folder_name(text) == folder
    assert re.fullmatch(r"odd\.text=a_b==[0-9a-f]{12}", variant_folder_name(parse_method_variant("odd:text=a b").label))
