"""`fedloom partition`: show a partition, plot it, or write it to a file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import Json, add_cli_options
from fedloom.cli.output import show_loading
from fedloom.config import Config, make_config
from fedloom.errors import InputError


@add_cli_options({"classes", "clients", "seed"})
def partition(
    data: Annotated[str, typer.Argument(help="data set (`fedloom list datasets`)")],
    spec: Annotated[str, typer.Argument(metavar="PARTITION", help="partition (`fedloom list partitions`)")],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="plot the classes of each client, as a page (.html) or an image (.svg)"),
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
    json_: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Show the samples of each client in a run with the same data, partition, clients and seed."""
    with show_loading():
        from fedloom.report.partition_plot import check_partition_plot_path

    config = make_config({**settings, "data": data, "partition": spec})
    if plot is not None:
        check_partition_plot_path(plot)
    if out is not None and out.suffix not in (".json", ".npz"):
        raise InputError(f"a partition is written as .json or .npz, not as {out.name!r}.")
    _show(config, spec, plot, out, json_)


def _show(config: Config, spec: str, plot: Path | None, out: Path | None, as_json: bool) -> None:
    with show_loading():
        from fedloom.cli.progress import ProgressDisplay
        from fedloom.core.rng import RngStreams
        from fedloom.data import load_dataset, select_classes
        from fedloom.data.partitions import partition_indices
        from fedloom.data.partitions.base import make_partition_pool
        from fedloom.data.partitions.files import write_partition_file
        from fedloom.data.partitions.statistics import compute_partition_statistics, count_partition_labels
        from fedloom.report.partition_plot import write_partition_plot

    display = ProgressDisplay()
    dataset = select_classes(load_dataset(config.data, progress=display.on_download), config.classes)
    display.on_run_end()
    for note in dataset.notes:
        display.on_message(note)
    pool = make_partition_pool(dataset)
    if plot is not None and not dataset.classes:
        raise InputError(f"{dataset.name!r} has no classes, so there is nothing to draw.")
    client_indices = partition_indices(
        config.partition, pool, config.clients, RngStreams(config.seed).numpy("partition")
    )
    statistics = compute_partition_statistics(client_indices, pool.labels, dataset.classes)
    metadata = {"data": config.data, "classes": config.classes, "partition": spec, "seed": config.seed}
    title = f"{config.data}{f', classes {config.classes}' if config.classes else ''}, {spec}, seed {config.seed}"
    if out is not None:
        write_partition_file(out, client_indices, pool.labels, metadata)
    if plot is not None:
        counts = count_partition_labels(client_indices, pool.labels, dataset.classes)
        write_partition_plot(plot, title, statistics.table_rows(), counts, dataset.class_names)
    files = {"file": str(out) if out else None, "plot": str(plot) if plot else None}
    if as_json:
        print(json.dumps({**metadata, **statistics.to_dict(), **files}))
        return
    rows = [*statistics.table_rows(), *((name, path) for name, path in files.items() if path)]
    print(title)
    for name, text in rows:
        print(f"  {name:<22}{text}")
