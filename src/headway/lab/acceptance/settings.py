"""How large a run of the acceptance table is, and which seeds it uses for what.

Evaluation seeds give the rows; on the tuning seeds whatever is chosen or fitted was chosen or fitted. The two never
meet, and both differ from the seeds of the calibration and of the shipped profiles.
"""

from __future__ import annotations

from msgspec import Struct

from headway.lab.truth import PRINTED_TARGET_SLOPE_MS_PER_TOKEN, TARGET_SLOPE_MS_PER_TOKEN

#: Rates where a claim names none, queries per second.
RATES_PER_S = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.3, 8.6, 8.9, 9.2, 9.5, 10.0, 12.0)
SLOPES = (TARGET_SLOPE_MS_PER_TOKEN, PRINTED_TARGET_SLOPE_MS_PER_TOKEN)
#: What bear does with a query that no instance can answer in time, in the rows of "the default fallback".
DEFAULT_FALLBACK = "least_work"


class Settings(Struct, frozen=True, kw_only=True):
    """The size of a run. ``num_queries`` is per simulation, ``lps_steps`` the events of each simulated queue."""

    name: str
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    rates_per_s: tuple[float, ...]
    num_queries: int
    num_estimate_queries: int
    num_step_queries: int
    num_fluid_queries: int
    lps_steps: int

    def rates_to(self, highest_per_s: float, lowest_per_s: float = 0.0) -> tuple[float, ...]:
        """The rates between two bounds, both included."""
        return tuple(rate for rate in self.rates_per_s if lowest_per_s <= rate <= highest_per_s)

    def nearest(self, rate_per_s: float) -> float:
        """The rate of this run that is nearest to one that a claim names."""
        return min(self.rates_per_s, key=lambda rate: abs(rate - rate_per_s))

    def describe(self, what: str = "") -> str:
        """What every row says of its run."""
        quick = "QUICK, reduced: " if self.name == "quick" else ""
        return f"{what}{'; ' if what else ''}{quick}{len(self.seeds)} seeds x {self.num_queries} queries"


FULL = Settings(
    name="full",
    seeds=(2101, 2102, 2103, 2104, 2105),
    tuning_seeds=(77, 78, 79),
    rates_per_s=RATES_PER_S,
    num_queries=10_000,
    num_estimate_queries=4_000,
    num_step_queries=600,
    num_fluid_queries=10_000,
    lps_steps=20_000,
)
QUICK = Settings(
    name="quick",
    seeds=(2101, 2102, 2103),
    tuning_seeds=(77,),
    rates_per_s=(3.0, 5.0, 8.0, 8.6, 9.5, 12.0),
    num_queries=1_200,
    num_estimate_queries=1_000,
    num_step_queries=300,
    num_fluid_queries=1_200,
    lps_steps=4_000,
)
