"""Reports: read run directories, compare runs, write an HTML page."""

from fedloom.report.comparison_record import ComparisonRecord
from fedloom.report.comparison_table import ComparisonTable, make_comparison_table
from fedloom.report.effects import EffectGrid, GridEffects, analyze_effects, read_effect_grid
from fedloom.report.page import write_report_page
from fedloom.report.records import RunRecord, read_run_record

__all__ = [
    "ComparisonRecord",
    "ComparisonTable",
    "EffectGrid",
    "GridEffects",
    "RunRecord",
    "analyze_effects",
    "make_comparison_table",
    "read_effect_grid",
    "read_run_record",
    "write_report_page",
]
