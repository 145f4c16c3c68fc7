"""The acceptance table: what this router claims, measured on simulated fleets, one row per number.

A group of rows names the units it needs (one simulation, one bound, one calibration each); units are run once, in
parallel, and shared between groups. Seeds on which anything was chosen are never those of a row. It refuses to hide: a
row that misses its threshold stands in the table like any other.
"""

from headway.lab.acceptance.run import GROUPS, acceptance_rows
from headway.lab.acceptance.settings import FULL, QUICK, Settings

__all__ = ["FULL", "GROUPS", "QUICK", "Settings", "acceptance_rows"]
