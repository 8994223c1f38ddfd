"""What came out of runs: read their folders, compare them honestly, show them on one page."""

from fedloom.report.html import write_report
from fedloom.report.records import Record, read_run
from fedloom.report.table import Comparison, compare
from fedloom.report.words import human_bytes, human_seconds

__all__ = ["Comparison", "Record", "compare", "human_bytes", "human_seconds", "read_run", "write_report"]
