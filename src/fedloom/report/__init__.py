"""What came out of runs: read their folders, compare them honestly, show them on one page."""

from fedloom.report.effects import Effects, analyse
from fedloom.report.grid import Grid, read_grid
from fedloom.report.html import write_report
from fedloom.report.records import Record, read_run
from fedloom.report.table import Comparison, compare
from fedloom.report.words import human_bytes, human_seconds

__all__ = [
    "Comparison",
    "Effects",
    "Grid",
    "Record",
    "analyse",
    "compare",
    "human_bytes",
    "human_seconds",
    "read_grid",
    "read_run",
    "write_report",
]
