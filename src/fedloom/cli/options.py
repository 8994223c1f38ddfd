"""Command-line options: shared ones, and those made from the fields of settings."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from fedloom.config import Config
from fedloom.utils.settings import Settings

# Options that several commands share.
Json = Annotated[
    bool, typer.Option("--json", metavar="", help="print one line of JSON on stdout, and nothing else there")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="hide the progress bar")]
Out = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="directory to write to; by default a new one in runs/"),
]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.OPTION=VALUE", help="option of a method; may be repeated"),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="FILE", help="Python file with methods of your own; may be repeated"),
]

PANELS = {
    "Federation": (
        "data", "classes", "normalize", "partition", "client_test", "server_data", "clients", "clients_per_round",
        "held_out_clients", "model", "init", "new_head", "init_sha256", "partition_sha256", "rounds", "seed",
    ),
    "Local training": (
        "epochs", "steps", "batch_size", "optimizer", "lr", "lr_schedule", "lr_decay", "lr_step",
        "lr_warmup", "momentum", "nesterov", "keep_optimizer", "weight_decay", "clip", "augment", "statistics",
        "channels_last", "validation",
    ),
    "Privacy": ("clip_update", "noise", "noise_source", "delta", "max_epsilon"),
    "Running": (
        "eval_every", "window", "min_clients", "failure_rate", "engine", "nodes", "deadline", "device", "precision",
        "fast", "workers", "slots", "checkpoint_seconds", "keep_checkpoints", "cache_dir",
    ),
}  # fmt: skip

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", bool: "yes|no"}
METAVAR_OF = {
    "init": "FILE|NAME", "classes": "LIST", "init_sha256": "HASH", "partition_sha256": "HASH", "cache_dir": "FOLDER",
}  # fmt: skip


def add_cli_options(
    fields: Collection[str] | None = None,
    settings_class: type[Settings] = Config,
    panels: Mapping[str, Collection[str]] = PANELS,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of `settings_class` to a command as options. Given values arrive in the dict `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        panel_by_field = {name: panel for panel, panel_fields in panels.items() for name in panel_fields}
        offered = [name for name in panel_by_field if fields is None or name in fields]

        def wrapper(**values: Any) -> None:
            settings = {name: values.pop(name) for name in offered}
            command(**values, settings={name: value for name, value in settings.items() if value is not None})

        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_option(settings_class, name, panel_by_field[name]),
            )
            for name in offered
        ]
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads its options from it
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + parameters
        )
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        return wrapper

    return decorate


def _option(settings_class: type[Settings], name: str, panel: str) -> Any:
    """Return a field as an option. Values stay text, because only the settings class validates them."""
    field = settings_class.model_fields[name]
    kind = field.annotation
    if isinstance(kind, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    flag = f"--{name.replace('_', '-')}"
    default = "" if field.default is None else f" [dim](default: {_shown(field.default)})[/]"
    help_text = (field.description or "").replace("[", r"\[") + default
    if kind is bool and field.default is not None:
        # Only the switch away from the default: with both, help of 80 characters cuts off option names.
        switch = f" /--no-{name.replace('_', '-')}" if field.default else flag
        if field.default:  # the switch turns the setting off
            help_text = f"do not {field.description}"
        return Annotated[bool | None, typer.Option(switch, help=help_text, metavar="", rich_help_panel=panel)]
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else METAVAR_OF.get(name, METAVARS[kind])
    return Annotated[str | None, typer.Option(flag, help=help_text, metavar=metavar, rich_help_panel=panel)]


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
