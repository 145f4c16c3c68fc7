"""The fleet as the router knows it: one replayed engine per instance, aged to ``now``."""

from headway._core import LengthRule
from headway.fleet.fleet_view import FleetView
from headway.fleet.gauges import Gauges
from headway.fleet.shadow import Shadow
from headway.fleet.view import DEFAULT_OUTPUT_TOKENS, InstanceView, LedgerEntry

__all__ = ["DEFAULT_OUTPUT_TOKENS", "FleetView", "Gauges", "InstanceView", "LedgerEntry", "LengthRule", "Shadow"]
