"""The `fedloom` command: run, resume, verify, compare, report and list."""

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
from fedloom.cli.demo.command import demo
from fedloom.cli.flower import flower
from fedloom.cli.listing import list_
from fedloom.cli.options import Imports, Json, MethodOptions, Out, Quiet, add_cli_options
from fedloom.cli.output import print_comparison, print_run_summary, show_loading
from fedloom.cli.partition import partition
from fedloom.config import EXECUTION_SETTINGS, parse_config_overrides
from fedloom.errors import FedloomError, InputError

# typer has its own copy of click since 0.26, and uses the installed one before: take the base class from its errors
ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

START = """\
fedloom runs and compares methods of federated learning. Five things to try:

  fedloom demo                                 five papers put to the test
  fedloom run fedcross                         one method, on handwritten digits
  fedloom compare fedavg fedcross --seeds 3    two methods: a table and a report
  fedloom run fedavg --data mine.csv,label=y   your own data
  fedloom list methods                         also: datasets, models, ...

All commands: fedloom --help. The options of one: fedloom run --help."""

app = typer.Typer(
    name="fedloom",
    help="Run and compare methods of federated learning on heterogeneous data. Every run is reproducible bit for bit.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

N = TypeVar("N", int, float)
T = TypeVar("T")


def _with_extras(settings: dict[str, Any], imports: list[str] | None) -> dict[str, Any]:
    return {**settings, **({"imports": imports} if imports else {})}


@app.command()
@add_cli_options()
def run(
    method: Annotated[
        str | None,
        typer.Argument(help="method, or several joined by +, each with options and settings: fedprox:mu=0.1,lr=0.05"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="TOML file of settings, such as config.toml of a run; options override it"
        ),
    ] = None,
    set_: MethodOptions = None,
    import_: Imports = None,
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run one method.

    Writes a directory with the configuration, metrics, checkpoints, the model and a report.
    """
    if method is None and config is None:
        raise InputError("Missing argument 'METHOD'; name a method (`fedloom list methods`), or give --config FILE.")
    with show_loading(quiet):
        from fedloom.cli.progress import ProgressDisplay
        from fedloom.runs.config_file import merge_config_file
        from fedloom.runs.execute import execute_run
        from fedloom.runs.resolve import resolve_config, resolve_run

    values = {**_with_extras(settings, import_), "method": method, "options": parse_config_overrides(set_ or ())}
    request = resolve_run(resolve_config(values if config is None else merge_config_file(config, values)))
    print_run_summary(_interruptible(partial(execute_run, request, out=out), ProgressDisplay(quiet)), json_)


@app.command()
@add_cli_options(EXECUTION_SETTINGS | {"device", "rounds"})
def resume(
    run: Annotated[Path, typer.Argument(help="run directory")],
    import_: Imports = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Continue a run that was stopped or killed. The result has the same bits as without the interruption.

    With --rounds, extend a finished run to this total, unless its method depends on the number of rounds.
    """
    with show_loading(quiet):
        from fedloom.cli.progress import ProgressDisplay
        from fedloom.methods import import_method_file
        from fedloom.runs.execute import resume

    for path in import_ or ():
        import_method_file(path)
    print_run_summary(_interruptible(partial(resume, run, **settings), ProgressDisplay(quiet)), json_)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="directory of a finished run")],
    import_: Imports = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a finished run and check that it gives the same model, bit for bit."""
    with show_loading(quiet):
        from fedloom.cli.progress import ProgressDisplay
        from fedloom.methods import import_method_file
        from fedloom.runs.execute import verify
        from fedloom.runs.inputs import explain_verify_mismatch
        from fedloom.runs.result import count_failures_in_result

    for path in import_ or ():
        import_method_file(path)
    before, now = _interruptible(partial(verify, run), ProgressDisplay(quiet), f"{run} was not verified.")
    same = before == now
    if json_:
        print(json.dumps({"run": str(run), "same": same, "digest": before, "digest_now": now}))
    elif same:
        print(f"{run} is exact: repeated, it gave the same model, {now}.")
    if not same:
        failed, moved = count_failures_in_result(run), explain_verify_mismatch(run)
        if failed:
            reason = f"{failed} client tasks failed in the first run, and verify does not repeat failures."
        elif moved:
            reason = f"a likely cause: {moved}."
        else:
            reason = "software, instruction set and GPU are the same, so the data or code outside fedloom changed."
        raise FedloomError(f"{run} gave {before} at first and {now} now; {reason}")


@app.command()
@add_cli_options()
def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="methods, each with options and settings of its own: fedavg fedavg:lr=0.03 fedprox:mu=0.1; "
            "with --grid, the rest of the grid"
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="run all combinations of servers x clients x refiners, such as fedavg,fedcross x sgd,fedprox x "
            "none,dynafed (fedavg, sgd and none add no part); invalid combinations are left out, with the reason",
            metavar="A,B x C,D",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="number of seeds: --seed and those after it", metavar="N")] = "1",
    target: Annotated[
        str | None, typer.Option(help="accuracy whose rounds to reach it are counted, such as 0.8", metavar="X")
    ] = None,
    concurrent_runs: Annotated[
        str, typer.Option(help="number of concurrent runs on one GPU, if one run does not fill it", metavar="N")
    ] = "1",
    set_: MethodOptions = None,
    import_: Imports = None,
    out: Out = None,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare methods over seeds, with the same clients and batches. Prints a table and writes one report.

    With --grid, runs all combinations of method parts. The report then shows the effect of each part.

    To resume a stopped comparison, repeat the command with the same --out.
    """
    with show_loading(quiet):
        from fedloom.cli.progress import ProgressDisplay
        from fedloom.runs.compare import compare
        from fedloom.runs.grids import plan_comparison_grid

    count, num_concurrent = _number("seeds", seeds, int), _number("concurrent_runs", concurrent_runs, int)
    values, options = _with_extras(settings, import_), parse_config_overrides(set_ or ())
    names, plan, goal = methods or [], None, None if target is None else _number("target", target, float)
    if grid is not None:  # without quotes, the shell passes `A,B` as the option and `x C,D` as methods
        text, names, display = " ".join([grid, *names]), [], ProgressDisplay(quiet)
        plan = _interruptible(partial(plan_comparison_grid, text, options, values), display)
        display.on_run_end()
    # concurrent runs share one bar
    display = ProgressDisplay(quiet, () if num_concurrent > 1 else plan.methods if plan else names, count)
    advice = f"continue with the same command and --out {out}" if out else None
    values |= {"grid": plan, "options": options, "out": out, "target": goal, "concurrent_runs": num_concurrent}
    result = _interruptible(partial(compare, names, count, **values), display, advice)
    print_comparison(result, json_)
    _raise_if_diverged(result.runs)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="directories of runs or of comparisons")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="file to write")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="title of the page")] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="number of last evaluations whose mean is the result, at most a fifth of all; by default the setting "
            "of each run",
            metavar="N",
        ),
    ] = None,
) -> None:
    """Write one report about several runs."""
    with show_loading():
        from fedloom.report import ComparisonRecord, read_effect_grid, read_run_record, write_report_page

    count = None if window is None else _number("window", window, int)
    folders = [folder for path in runs for folder in _runs_in(path)]
    alone = len(runs) == 1  # with other runs, the cells of a grid would be ambiguous
    grid, command = (read_effect_grid(runs[0]), ComparisonRecord.read(runs[0]).command) if alone else (None, None)
    write_report_page(
        [read_run_record(folder) for folder in folders], out, title=title, grid=grid, window=count, command=command
    )
    print(out)


def _number(name: str, text: str, kind: type[N]) -> N:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{name} must be a {'whole ' if kind is int else ''}number, not {text!r}.") from None


def _runs_in(path: Path) -> list[Path]:
    """Return `path` if it is a run directory, else the run directories in it."""
    from fedloom.report import ComparisonRecord
    from fedloom.runs.directory import is_run_directory

    if is_run_directory(path):
        return [path]
    inside = {config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/config.toml")}
    if not inside:
        raise InputError(f"{path} is not a run, and no run lies in it.")
    return ComparisonRecord.read(path).sort_runs(inside)


app.command("list")(list_)
app.command()(partition)
app.command()(demo)
app.add_typer(flower)


def _interruptible(work: Callable[..., T], display: Any, advice: str | None = None) -> T:
    """Do the work, with its progress on the display. If it is interrupted, raise an error that says how to continue."""
    from fedloom.cli.interrupts import StopOnSignal

    try:
        # Signals first: a display says that the run has started, and then somebody may stop it.
        return work(callbacks=[StopOnSignal(), display])
    except KeyboardInterrupt:
        display.on_run_end()
        if advice is None and display.folder:
            advice = f"continue with: fedloom resume {display.folder}"
        raise _Interrupted(f"interrupted; {advice}" if advice else "interrupted") from None


def _raise_if_diverged(runs: Sequence[Any]) -> None:
    """Raise an error if runs of a comparison diverged."""
    diverged = [run.diverged for run in runs if run.diverged is not None]
    if diverged:
        raise FedloomError(f"{len(diverged)} of {len(runs)} runs diverged; the first: {diverged[0]}.")


class _Interrupted(FedloomError):
    exit_code = 130


def _threads_run() -> bool:
    """Return whether other threads still execute runs, so that Python cannot exit normally."""
    from fedloom.runs.concurrent import THREADS

    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def _version(show: bool) -> None:
    if show:
        print(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(START)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Every error becomes one sentence on stderr and an exit code."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        _refuse_undecodable(words)
        code = app(args=words, prog_name="fedloom", standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into this code, without a message
            _complain("interrupted")
        if sys.stdout is not None:
            sys.stdout.flush()  # now, because an error at the exit of Python would print a traceback
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
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        _end_without_reader()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends with 1
            _end_without_reader()
        raise
    except UnicodeEncodeError as error:  # a path that comes from the current folder or a file
        _complain(f"{error.object!r} is not text in UTF-8; rename the file or folder.")
        sys.exit(2)
    except OSError as error:  # a full disk behind stdout, say
        _complain(f"{error.strerror or error}.")
        sys.exit(1)


def _refuse_undecodable(words: Sequence[str]) -> None:
    """Raise an InputError for an argument that is not UTF-8: files of a run could not hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InputError(f"{word!r} is not text in UTF-8; rename the file or folder.") from None


def _end_without_reader() -> None:
    """Exit like a program that SIGPIPE has ended, without a message at the exit of Python."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    sys.exit(141)


def _complain(text: str) -> None:
    print(f"fedloom: {' '.join(text.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
