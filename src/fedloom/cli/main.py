"""The command `fedloom`."""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fedloom._version import __version__
from fedloom.cli.flower import flower
from fedloom.cli.options import PRETRAINING, add_cli_options
from fedloom.cli.output import print_effects, print_methods, print_run_summary, print_table
from fedloom.cli.partition import partition
from fedloom.config import EXECUTION_SETTINGS, PretrainConfig, make_config, parse_config_overrides
from fedloom.errors import FedloomError, InputError
from fedloom.utils.formatting import format_percent

# typer carries its own copy of click since 0.26 and uses the installed one before: ask it for the base of its errors
ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="fedloom",
    help="Federated learning on heterogeneous data: run and compare methods, with the same bits every time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

N = TypeVar("N", int, float)

Json = Annotated[
    bool, typer.Option("--json", metavar="", help="print one line of JSON on stdout and nothing else there")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="show no progress")]
Out = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="the folder to write to; by default a new one in runs/"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.OPTION=VALUE", help="an option of a method; may be repeated"),
]
Imports = Annotated[
    list[str] | None, typer.Option("--import", metavar="FILE", help="a Python file with methods of your own")
]


def _with_extras(settings: dict[str, Any], imports: list[str] | None) -> dict[str, Any]:
    return {**settings, **({"imports": imports} if imports else {})}


@app.command()
@add_cli_options()
def run(
    method: Annotated[str, typer.Argument(help="the method, or several joined by +")],
    set_: Settings = None,
    import_: Imports = None,
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run one method.

    Writes a folder with the configuration, metrics, checkpoints, the model and a report.
    """
    from fedloom.cli.progress import ProgressDisplay
    from fedloom.runs.execute import execute_run

    config = make_config(
        {**_with_extras(settings, import_), "method": method, "options": parse_config_overrides(set_ or ())}
    )
    display = ProgressDisplay(quiet)
    finished = _interruptible(lambda: execute_run(config, out=out, watcher=display), display)
    print_run_summary(finished, json_)


@app.command()
@add_cli_options(EXECUTION_SETTINGS | {"device"})
def resume(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    import_: Imports = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Continue a run that was stopped or killed. The result has the same bits as without the interruption."""
    from fedloom.cli.progress import ProgressDisplay
    from fedloom.methods import import_file
    from fedloom.runs.execute import resume

    for path in import_ or ():
        import_file(path)
    display = ProgressDisplay(quiet)
    print_run_summary(_interruptible(lambda: resume(run, watcher=display, **settings), display), json_)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="the folder of a finished run")],
    import_: Imports = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a finished run from its folder and prove that it gives the same model, bit for bit."""
    from fedloom.cli.progress import ProgressDisplay
    from fedloom.methods import import_file
    from fedloom.runs.execute import verify
    from fedloom.runs.result import count_failed_clients

    for path in import_ or ():
        import_file(path)
    display = ProgressDisplay(quiet)
    before, now = _interruptible(lambda: verify(run, watcher=display), display, f"{run} was not verified.")
    same = before == now
    if json_:
        print(json.dumps({"run": str(run), "same": same, "digest": before, "digest_now": now}))
    elif same:
        print(f"{run} is exact: run again, it gave the same model, {now}.")
    if not same:
        lost = count_failed_clients(run)
        reason = (
            f"{lost} answers of clients were lost then, which nobody loses again."
            if lost
            else "other versions (see config.toml) or another processor round differently."
        )
        raise FedloomError(f"{run} gave {before} then and {now} now; {reason}")


@app.command()
@add_cli_options()
def compare(
    methods: Annotated[list[str] | None, typer.Argument(help="the methods; with --grid, the rest of the grid")] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="run all combinations of servers x locals x refiners, such as fedavg,fedcross x sgd,fedprox x "
            "none,dynafed (fedavg, sgd and none add no part); what cannot be combined is left out, with the reason",
            metavar="A,B x C,D",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="number of seeds: --seed and those after it", metavar="N")] = "1",
    target: Annotated[
        str | None, typer.Option(help="count the rounds until this accuracy is reached, such as 0.8", metavar="X")
    ] = None,
    at_once: Annotated[
        str, typer.Option(help="runs at a time on one GPU, if one alone does not fill it", metavar="N")
    ] = "1",
    set_: Settings = None,
    import_: Imports = None,
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare methods over seeds, on the same clients and batches. Prints a table and writes one report.

    With --grid all combinations of parts are run, and the report says which part helped how much.

    To continue a comparison that was stopped, give the same command with the same --out.
    """
    from fedloom.cli.progress import ProgressDisplay
    from fedloom.runs.compare import compare, plan_comparison_grid

    count, options = _number("seeds", seeds, int), parse_config_overrides(set_ or ())
    goal = None if target is None else _number("target", target, float)
    together = _number("at_once", at_once, int)
    values, names = _with_extras(settings, import_), methods or []
    plan = None
    if grid is not None:  # without quotes the shell hands over `A,B` as the option and `x C,D` as methods
        text, names, eye = " ".join([grid, *names]), [], ProgressDisplay(quiet)
        plan = _interruptible(lambda: plan_comparison_grid(text, options, values, watcher=eye), eye)
        eye.end()
    display = ProgressDisplay(quiet, runs=count * len(plan.methods if plan else names))
    advice = f"go on with the same command and --out {out}" if out else None
    result = _interruptible(
        lambda: compare(
            names, count, grid=plan, options=options, out=out, target=goal, at_once=together, watcher=display, **values
        ),
        display,
        advice,
    )
    if json_:
        runs = [finished.summary for finished in result.runs]
        found = {"path": str(result.path), "headline": result.table.headline, "runs": runs}
        print(json.dumps(found | ({"grid": result.effects.as_data()} if result.effects else {})))
        return
    titles, rows = result.table.table("brief")
    print_table(titles, rows)
    if result.effects:
        print_effects(result.effects)
    print(f"\n{result.table.headline}")
    for note in result.table.notes:
        print(note)
    print(f"report: {result.path / 'report.html'}")


@app.command()
@add_cli_options(kind=PretrainConfig, shown=PRETRAINING)
def pretrain(
    data: Annotated[str, typer.Argument(help="the data set (`fedloom list datasets`)")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="the safetensors file to write")],
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train a network on one data set in the ordinary way, to start from it with --init.

    To continue a pretraining that was stopped or killed, give the same command; the result is the same.
    """
    from fedloom.cli.progress import ProgressDisplay
    from fedloom.runs.pretrain import pretrain

    display = ProgressDisplay(quiet, unit="epoch")
    work = partial(pretrain, data, out, watcher=display, **settings)
    made = _interruptible(work, display, "go on with the same command.")
    about = {**made.about, "file": str(made.path), "sha256": made.sha256}
    if json_:
        print(json.dumps({name: value for name, value in about.items() if name not in ("history", "settings")}))
        return
    classes = f"{about['classes']} classes of {about['data']}"
    print(f"{'accuracy':<10}{format_percent(made.accuracy)} on test data of {classes} (loss {about['loss']:.4f})")
    print(f"{'file':<10}{made.path}")
    print(f"{'digest':<10}{made.digest}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, or of comparisons")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="the file to write")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="the title of the page")] = None,
) -> None:
    """Write one report about several runs."""
    from fedloom.report import read_effect_grid, read_run_record, write_report_page

    folders = [folder for path in runs for folder in _runs_in(path)]
    grid = read_effect_grid(runs[0]) if len(runs) == 1 else None  # beside other runs a grid's cells would be ambiguous
    write_report_page([read_run_record(folder) for folder in folders], out, title=title, grid=grid)
    print(out)


def _number(name: str, text: str, kind: type[N]) -> N:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{name} must be a {'whole ' if kind is int else ''}number, not {text!r}.") from None


def _runs_in(path: Path) -> list[Path]:
    """`path` itself if it is a run, else the runs in it."""
    from fedloom.runs.directory import is_run_directory

    if is_run_directory(path):
        return [path]
    inside = sorted(config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/config.toml"))
    if not inside:
        raise InputError(f"{path} is not a run, and no run lies in it.")
    return inside


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|partitions", help="what to list")],
    json_: Json = False,
    import_: Imports = None,
) -> None:
    """List the methods with their options, the data sets, the networks or the partitions."""
    from fedloom.cli.output import LISTINGS
    from fedloom.methods import import_file

    if what not in LISTINGS:
        from fedloom.errors import unknown_name_error

        raise unknown_name_error("kind of thing to list", what, LISTINGS)
    for path in import_ or ():
        import_file(path)
    entries = LISTINGS[what]()
    if json_:
        print(json.dumps(entries))
        return
    if what == "methods":
        print_methods(entries)
    else:
        titles = [title for title in entries[0] if title not in ("options", "found", "missing", "get")]
        print_table(titles, [[_cell(entry[title]) for title in titles] for entry in entries])
    if what == "models":
        print("\nAny of them with MOON's projection before its last layer: --model NAME+projection")
    for entry in entries:
        if entry.get("missing"):
            print(f"\n{entry['name']} is read without {', '.join(entry['missing'])}.")
        if entry.get("get"):
            print(f"\n{entry['name']} must be fetched by hand: {entry['get']}.")
    if "options" in entries[0]:
        form, dot = ("--set METHOD.OPTION=VALUE", ".") if what == "methods" else ("--model NAME:OPTION=VALUE,...", ":")
        print(f"\nOptions ({form}):")
        lines = [
            [f"{entry['name']}{dot}{option['name']}", _cell(option["default"]), option["help"]]
            for entry in entries
            for option in entry["options"]
        ]
        print_table(["option", "default", "meaning"], lines, width=100)


app.command()(partition)
app.add_typer(flower)


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) if value and isinstance(value[0], int) else ", ".join(map(str, value))
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "" if value is None else str(value)
    )


def _interruptible(work: Callable[[], Any], display: Any, advice: str | None = None) -> Any:
    """Do the work; a second Ctrl-C ends it at once, with a word on how to go on."""
    try:
        return work()
    except KeyboardInterrupt:
        display.end()
        if advice is None and display.folder:
            advice = f"go on with: fedloom resume {display.folder}"
        raise _Interrupted(f"interrupted; {advice}" if advice else "interrupted") from None


class _Interrupted(FedloomError):
    exit_code = 130


def _threads_run() -> bool:
    """Whether runs go on in other threads. Python cannot end in good order beside them."""
    from fedloom.runs.concurrent import THREADS

    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def _version(show: bool) -> None:
    if show:
        print(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every error ends in one sentence on stderr and an exit code."""
    try:
        words = None if arguments is None else list(arguments)
        code = app(args=words, prog_name="fedloom", standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into this code, without a word
            _complain("interrupted")
        sys.exit(code if isinstance(code, int) else 0)
    except ClickException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
        else:
            _complain(message)
        sys.exit(error.exit_code)
    except FedloomError as error:
        _complain(str(error))
        if isinstance(error, _Interrupted) and _threads_run():
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a full disk behind stdout, say
        _complain(f"{error.strerror or error}.")
        sys.exit(1)


def _complain(text: str) -> None:
    print(f"fedloom: {' '.join(text.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
