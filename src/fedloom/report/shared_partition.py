"""Note that all seeds of a comparison share one partition."""

from collections.abc import Sequence

import numpy as np

from fedloom.report.records import RunRecord
from fedloom.report.statistics import GroupStatistics
from fedloom.utils.formatting import format_list

FIXED = ("own", "file")
"""Partitions that do not depend on the seed."""
SOMETIMES_FIXED = ("own by seed", "natural", "domain")
"""Partitions that may be the same for all seeds; the counts of the clients show it."""


def describe_shared_partition(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return a sentence if the seeds of a group share one partition, so that their spread leaves it out."""
    several = [group for group in groups if len({run.seed for run in group.runs}) > 1]
    shared = [group.label for group in several if _shares_partition(group.runs)]
    if not shared:
        return []
    whose = "" if len(shared) == len(several) else f" of {format_list(shared)}"
    return [f"All seeds{whose} share one partition, so the spread over seeds does not cover other partitions."]


def _shares_partition(runs: Sequence[RunRecord]) -> bool:
    kinds = {str(run.config.get("partition", "")).partition(":")[0].partition(",")[0] for run in runs}
    if kinds <= set(FIXED):
        return True
    if not kinds <= set(SOMETIMES_FIXED):
        return False
    first = runs[0].counts
    return first is not None and all(run.counts is not None and np.array_equal(run.counts, first) for run in runs[1:])
