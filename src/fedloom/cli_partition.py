"""`fedloom partition`: a partition looked at before it is trained on, or written to a file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli_options import settable
from fedloom.config import Config, make_config
from fedloom.errors import InputError


@settable({"classes", "clients", "seed"})
def partition(
    data: Annotated[str, typer.Argument(help="the data set (`fedloom list datasets`)")],
    spec: Annotated[str, typer.Argument(metavar="PARTITION", help="the partition (`fedloom list partitions`)")],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw who holds which classes: a page (.html) or a picture (.svg)"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="write the partition to a new file (.json or .npz), for --partition file:FILE",
        ),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", metavar="", help="print one line of JSON on stdout and nothing else there")
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Show which client holds what, in a run with the same data, partition, clients and seed."""
    from fedloom.report.partition import check_plot

    config = make_config({**settings, "data": data, "partition": spec})
    if plot is not None:
        check_plot(plot)
    if out is not None and out.suffix not in (".json", ".npz"):
        raise InputError(f"a partition is written as .json or .npz, not as {out.name!r}.")
    _show(config, spec, plot, out, json_)


def _show(config: Config, spec: str, plot: Path | None, out: Path | None, as_json: bool) -> None:
    from fedloom.data import keep_classes, load
    from fedloom.data.partition import partition, pool_of
    from fedloom.data.partitions.files import write_parts
    from fedloom.data.partitions.statistics import count_labels, describe
    from fedloom.progress import Display
    from fedloom.report.partition import write_plot
    from fedloom.streams import Streams

    display = Display()
    dataset = keep_classes(load(config.data, progress=display.download), config.classes)
    display.end()
    for note in dataset.notes:
        display.note(note)
    pool = pool_of(dataset)
    if plot is not None and not dataset.classes:
        raise InputError(f"{dataset.name!r} has no classes, so there is nothing to draw.")
    parts = partition(config.partition, pool, config.clients, Streams(config.seed).numpy("partition"))
    found = describe(parts, pool.labels, dataset.classes)
    about = {"data": config.data, "classes": config.classes, "partition": spec, "seed": config.seed}
    title = f"{config.data}{f', classes {config.classes}' if config.classes else ''}, {spec}, seed {config.seed}"
    if out is not None:
        write_parts(out, parts, pool.labels, about)
    if plot is not None:
        counts = count_labels(parts, pool.labels, dataset.classes)
        write_plot(plot, title, found.rows(), counts, dataset.class_names)
    files = {"file": str(out) if out else None, "plot": str(plot) if plot else None}
    if as_json:
        print(json.dumps({**about, **found.as_data(), **files}))
        return
    rows = [*found.rows(), *((name, path) for name, path in files.items() if path)]
    print(title)
    for name, text in rows:
        print(f"  {name:<22}{text}")
