"""A11, A15, A19, A22: what the estimate is worth, and how near BEAR comes to what knowing everything would give."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, SLOPES, Settings
from headway.lab.acceptance.table import Group, Results, Unit, on_time, row
from headway.lab.acceptance.units import Knowledge, Maker, Play, bear, grid, play, pool_of, workload_of
from headway.lab.fluid import fluid_bound
from headway.lab.intervals import Interval, paired_gain, t_interval

_REPLAY_RATES_PER_S = (7.0, 8.6)
_MIN_REPLAY_GAIN = 0.10
_LENGTHS: tuple[tuple[str, Knowledge], ...] = (("noisy", "predicted"), ("oracle", "lengths"))
_HIGHEST_PER_S = 8.6
#: Name, what it knows, in words, and the least share of it that is claimed.
_ORACLES: tuple[tuple[str, Knowledge, str, float | None], ...] = (
    ("oracle", "all", "true lengths, qualities and clock", 0.91),
    ("oracle_latency", "lengths+clock", "true lengths and clock", 0.98),
    ("true_clock", "clock", "the true clock only", None),
    ("true_lengths", "lengths", "true lengths only", None),
    ("true_costs", "costs", "true costs only, in its utilities", None),
)
_MIN_BOUND_SHARE = 0.88
LAMBDAS_PER_MUSD = (0.0, 1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3)


# ------------------------------------------------------------ A11: replay against throughput


def _by_estimate(settings: Settings, slope: float, knowledge: Knowledge) -> tuple[Maker, Maker, Maker]:
    """BEAR by replay, by throughput, and by throughput with θ refitted on a tuning seed."""
    by_throughput, refitted = (
        play(
            settings,
            "bear_throughput",
            slope=slope,
            knowledge=knowledge,
            options=(("fallback", DEFAULT_FALLBACK),),
            refit_seed=seed,
        )
        for seed in (None, settings.tuning_seeds[0])
    )
    return bear(settings, slope=slope, knowledge=knowledge), by_throughput, refitted


def _replay_needs(settings: Settings) -> list[Play]:
    rates = settings.rates_to(_REPLAY_RATES_PER_S[1], _REPLAY_RATES_PER_S[0])
    makers = [
        make for slope in SLOPES for _, knowledge in _LENGTHS for make in _by_estimate(settings, slope, knowledge)
    ]
    return grid(makers, rates, settings.seeds)


def _replay_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates, rows = settings.rates_to(_REPLAY_RATES_PER_S[1], _REPLAY_RATES_PER_S[0]), []
    for slope in SLOPES:
        for lengths, knowledge in _LENGTHS:
            ours, theirs, refitted = (
                results.figures(make, rates, settings.seeds).mean(axis=0).tolist()
                for make in _by_estimate(settings, slope, knowledge)
            )
            setting = f"mean over {rates[0]:g}...{rates[-1]:g} qps, slope {slope:g}, {lengths} lengths"
            rows.append(
                row(
                    f"A11-{lengths}-{slope:g}",
                    "OnTimeUtility of bear by replay over bear by prefill throughput (authors' theta)",
                    settings.describe(f"{setting}, fallback {DEFAULT_FALLBACK}"),
                    paired_gain(ours, theirs),
                    at_least=_MIN_REPLAY_GAIN if slope == SLOPES[0] else None,
                )
            )
            rows.append(
                row(
                    f"A11-{lengths}-{slope:g}-refitted",
                    "OnTimeUtility of bear by replay over bear by prefill throughput, theta refitted on another seed",
                    settings.describe(f"{setting}, fallback {DEFAULT_FALLBACK}"),
                    paired_gain(ours, refitted),
                )
            )
    return rows


# ------------------------------------------------------------ A15: oracles


def _oracle_needs(settings: Settings) -> list[Play]:
    makers = [bear(settings), *(bear(settings, knowledge=knowledge) for _, knowledge, _, _ in _ORACLES)]
    return grid(makers, settings.rates_to(_HIGHEST_PER_S), settings.seeds)


def _oracle_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates, rows = settings.rates_to(_HIGHEST_PER_S), []
    ours = results.figures(bear(settings), rates, settings.seeds).mean(axis=0).tolist()
    setting = settings.describe(f"mean over {rates[0]:g}...{rates[-1]:g} qps, fallback {DEFAULT_FALLBACK}")
    for name, knowledge, known, bound in _ORACLES:
        theirs = results.figures(bear(settings, knowledge=knowledge), rates, settings.seeds).mean(axis=0).tolist()
        claim = f"share of the OnTimeUtility of {name} (bear with {known}) that bear reaches"
        rows.append(row(f"A15-{name}", claim, setting, share_of(paired_gain(ours, theirs)), at_least=bound))
    return rows


def share_of(gain: Interval) -> Interval:
    """A relative gain as the share of the other's that is reached."""
    low, high = gain.low, gain.high
    return Interval(1.0 + gain.value, None if low is None else 1.0 + low, None if high is None else 1.0 + high)


# ------------------------------------------------------------ A19: the fluid bound


class Bound(Struct, frozen=True, kw_only=True):
    """The fluid bound of one seed's workload at a rate, over its first queries, with predicted utilities."""

    rate_per_s: float
    seed: int
    num_queries: int

    @property
    def cost(self) -> float:
        """A linear program."""
        return self.num_queries * 30.0

    def run(self) -> float:
        """In utility per query."""
        unit = Play(policy="bear", rate_per_s=self.rate_per_s, seed=self.seed, num_queries=self.num_queries)
        return fluid_bound(workload_of(unit), pool_of(), self.rate_per_s).utility


def bound_unit(settings: Settings, seed: int) -> Bound:
    """The bound at 8 queries per second on one seed."""
    return Bound(rate_per_s=settings.nearest(8.0), seed=seed, num_queries=settings.num_fluid_queries)


def _bound_needs(settings: Settings) -> Sequence[Unit[object]]:
    runs = grid([bear(settings)], [settings.nearest(8.0)], settings.seeds)
    return [*runs, *(bound_unit(settings, seed) for seed in settings.seeds)]


def _bound_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate = settings.nearest(8.0)
    ours = [on_time(one) for one in results.scores(bear(settings), rate, settings.seeds)]
    bounds = [results.of(bound_unit(settings, seed)) for seed in settings.seeds]
    shares = [mine / bound for mine, bound in zip(ours, bounds, strict=True)]
    setting = settings.describe(
        f"{rate:g} qps, bound over {settings.num_fluid_queries} queries per seed, fallback {DEFAULT_FALLBACK}"
    )
    return [
        row(
            "A19",
            "smallest share of its seed's fluid bound that bear reaches",
            setting,
            min(shares),
            at_least=_MIN_BOUND_SHARE,
        ),
        row("A19-mean", "mean share of the fluid bound that bear reaches", setting, t_interval(shares)),
        row("A19-bound", "fluid bound with predicted utilities, utility per query", setting, t_interval(bounds)),
    ]


# ------------------------------------------------------------ A22: lambda


def _lambda_pair(settings: Settings, value: float) -> tuple[Maker, Maker]:
    return bear(settings, lambda_per_musd=value), play(settings, "latency_agnostic", lambda_per_musd=value)


def _lambda_needs(settings: Settings) -> list[Play]:
    makers = [make for value in LAMBDAS_PER_MUSD for make in _lambda_pair(settings, value)]
    return grid(makers, [settings.nearest(8.0)], settings.seeds)


def _lambda_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, rows = settings.nearest(8.0), []
    for value in LAMBDAS_PER_MUSD:
        ours, theirs = (
            [on_time(one) for one in results.scores(make, rate, settings.seeds)]
            for make in _lambda_pair(settings, value)
        )
        setting = settings.describe(f"{rate:g} qps, lambda {value:g} per micro-USD, fallback {DEFAULT_FALLBACK}")
        gain = paired_gain(ours, theirs)
        claim = "OnTimeUtility of bear over latency agnostic"
        rows.append(row(f"A22-{value:g}", claim, setting, gain, at_least=0.0, passed=gain.value > 0.0))
    return rows


GROUPS = (
    Group("A11", _replay_needs, _replay_rows),
    Group("A15", _oracle_needs, _oracle_rows),
    Group("A19", _bound_needs, _bound_rows),
    Group("A22", _lambda_needs, _lambda_rows),
)
