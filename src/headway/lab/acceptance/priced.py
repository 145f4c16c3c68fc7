"""A18, A20: what charging for work and harm gains over BEAR, where it gains nothing, and how near the bound it is.

Both rules play with the default fallback. What was chosen of priced_bear was chosen on seeds of its own (3101 to 3115),
neither the evaluation seeds nor the tuning seeds of other rows. Beside the score stand the things that it hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.knowledge import bound_unit, share_of
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, SLOPES, Settings
from headway.lab.acceptance.table import Group, Results, Unit, on_time, row
from headway.lab.acceptance.units import Maker, Play, bear, grid, play
from headway.lab.intervals import paired_gain, paired_interval, t_interval
from headway.lab.metrics import Score
from headway.policy.registry import PRICES

_LOWEST_PER_S, _HIGHEST_PER_S = 5.0, 12.0
_MIN_GAIN, _MAX_LOSS = 0.035, -0.01
_MIN_BOUND_SHARE = 0.93
#: Where the other settings and the other price rules are played.
_SOME_RATES_PER_S = (5.0, 8.0, 12.0)
#: Up to which rate the oracle is no worse off than BEAR: beyond, its own fallback decides.
_ORACLE_HIGHEST_PER_S = 8.6
#: Settings in which nothing may be lost: name, in words, and what is unlike the default.
_ELSEWHERE: tuple[tuple[str, str, Mapping[str, object]], ...] = (
    ("mmpp", "MMPP-2 r = 6", {"burst_ratio": 6.0}),
    ("lambda", "lambda 0.0001 per micro-USD", {"lambda_per_musd": 1e-4}),
    ("chat", "chat-heavy mix", {"mix": "chat_heavy"}),
    ("printed", f"slope {SLOPES[1]:g}", {"slope": SLOPES[1]}),
)


def priced(settings: Settings, *, price: object = PRICES[0], **more: object) -> Maker:
    """Units of priced_bear with a price rule, by default its own default."""
    return play(settings, "priced_bear", options=(("fallback", DEFAULT_FALLBACK), ("price", price)), **more)


def _some(settings: Settings, rates_per_s: Sequence[float]) -> list[float]:
    """Those rates of the run that are nearest to the ones asked, each once."""
    return list(dict.fromkeys(settings.nearest(rate) for rate in rates_per_s))


# ------------------------------------------------------------ A18: against BEAR


def _gain_needs(settings: Settings) -> list[Play]:
    rates = settings.rates_to(_HIGHEST_PER_S, _LOWEST_PER_S)
    units = grid([bear(settings), priced(settings)], rates, settings.seeds)
    rules = [priced(settings, price=price) for price in PRICES]
    units += grid(rules, _some(settings, _SOME_RATES_PER_S), settings.seeds)
    for _, _, unlike in _ELSEWHERE:
        makers = [bear(settings, DEFAULT_FALLBACK, **unlike), priced(settings, **unlike)]
        units += grid(makers, _some(settings, _SOME_RATES_PER_S), settings.seeds)
    return units + grid([_oracle(settings)], _oracle_rates(settings), settings.seeds)


def _gain_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates = settings.rates_to(_HIGHEST_PER_S, _LOWEST_PER_S)
    claim = "OnTimeUtility of priced_bear over bear"
    setting = settings.describe(f"mean over {rates[0]:g}...{rates[-1]:g} qps, fallback {DEFAULT_FALLBACK}")
    gain = paired_gain(*(_means(settings, results, make, rates) for make in (priced(settings), bear(settings))))
    rows = [row("A18", claim, setting, gain, at_least=_MIN_GAIN)]
    rows += [_at_rate(settings, results, rate, "", words="Poisson", unlike={}) for rate in rates]
    for name, words, unlike in _ELSEWHERE:
        some = _some(settings, _SOME_RATES_PER_S)
        rows += [_at_rate(settings, results, rate, name, words=words, unlike=unlike) for rate in some]
    return rows + _rule_rows(settings, results) + _oracle_rows(settings, results) + _hidden_rows(settings, results)


def _at_rate(
    settings: Settings, results: Results, rate: float, name: str, *, words: str, unlike: Mapping[str, object]
) -> AcceptanceRow:
    """The gain at one rate. Where a setting is named a loss is bounded, and the lower end of the interval decides."""
    ours, theirs = (
        [on_time(one) for one in results.scores(make, rate, settings.seeds)]
        for make in (priced(settings, **unlike), bear(settings, DEFAULT_FALLBACK, **unlike))
    )
    gain = paired_gain(ours, theirs)
    setting = settings.describe(f"{rate:g} qps, {words}, fallback {DEFAULT_FALLBACK}")
    claim = "OnTimeUtility of priced_bear over bear"
    if not name:
        return row(f"A18-{rate:g}", claim, setting, gain)
    low = gain.value if gain.low is None else gain.low
    claim += ", judged by the lower end of the interval"
    return row(f"A18-{name}-{rate:g}", claim, setting, gain, at_least=_MAX_LOSS, passed=low >= _MAX_LOSS)


def _rule_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    """Each price rule over the same rates."""
    rates = _some(settings, _SOME_RATES_PER_S)
    setting = settings.describe(
        f"mean over {', '.join(f'{rate:g}' for rate in rates)} qps, fallback {DEFAULT_FALLBACK}"
    )
    theirs = _means(settings, results, bear(settings), rates)
    return [
        row(
            f"A18-price-{price}",
            f"OnTimeUtility of priced_bear with price {price} over bear",
            setting,
            paired_gain(_means(settings, results, priced(settings, price=price), rates), theirs),
        )
        for price in PRICES
    ]


def _oracle(settings: Settings) -> Maker:
    return bear(settings, knowledge="all")


def _oracle_rates(settings: Settings) -> tuple[float, ...]:
    return settings.rates_to(_ORACLE_HIGHEST_PER_S, _LOWEST_PER_S)


def _oracle_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates = _oracle_rates(settings)
    setting = settings.describe(f"mean over {rates[0]:g}...{rates[-1]:g} qps, fallback {DEFAULT_FALLBACK}")
    theirs = _means(settings, results, _oracle(settings), rates)
    return [
        row(
            f"A18-oracle-{name}",
            f"share of the OnTimeUtility of oracle (bear with true lengths, qualities and clock) that {name} reaches",
            setting,
            share_of(paired_gain(_means(settings, results, make, rates), theirs)),
        )
        for name, make in (("priced_bear", priced(settings)), ("bear", bear(settings)))
    ]


def _hidden_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    """What a score hides, of both rules: attainment per task, on-time negatives, tails, the share refused."""
    rows = []
    for rate in _some(settings, (8.0, 12.0)):
        setting = settings.describe(f"{rate:g} qps, fallback {DEFAULT_FALLBACK}")
        for name, make in (("priced_bear", priced(settings)), ("bear", bear(settings))):
            scores = results.scores(make, rate, settings.seeds)
            for figure, words, values in _hidden(scores):
                rows.append(row(f"A18-{rate:g}-{name}-{figure}", f"{words} under {name}", setting, t_interval(values)))
    return rows


def _hidden(scores: Sequence[Score]) -> list[tuple[str, str, list[float]]]:
    figures = [
        ("in_time", "share answered in time", [one.attainment for one in scores]),
        ("negative", "on-time negatives, utility per query", [one.on_time_negative for one in scores]),
        ("refused", "share refused or failed", [one.refused + one.failed for one in scores]),
        ("p99", "TTFT of the slowest in a hundred, seconds", [one.ttft_p99_s or 0.0 for one in scores]),
    ]
    return figures + [
        (f"in_time-{task}", f"share of {task} answered in time", [one.tasks[task].attainment for one in scores])
        for task in scores[0].tasks
    ]


def _means(settings: Settings, results: Results, make: Maker, rates: Sequence[float]) -> list[float]:
    """OnTimeUtility by seed, over the rates."""
    means: list[float] = results.figures(make, rates, settings.seeds).mean(axis=0).tolist()
    return means


# ------------------------------------------------------------ A20: the fluid bound


def _bound_needs(settings: Settings) -> Sequence[Unit[object]]:
    makers = [bear(settings), *(priced(settings, price=price) for price in PRICES)]
    runs = grid(makers, [settings.nearest(8.0)], settings.seeds)
    return [*runs, *(bound_unit(settings, seed) for seed in settings.seeds)]


def _bound_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate = settings.nearest(8.0)
    bounds = [results.of(bound_unit(settings, seed)) for seed in settings.seeds]
    setting = settings.describe(
        f"{rate:g} qps, bound over {settings.num_fluid_queries} queries per seed, fallback {DEFAULT_FALLBACK}"
    )
    shares = {
        name: [
            on_time(one) / bound for one, bound in zip(results.scores(make, rate, settings.seeds), bounds, strict=True)
        ]
        for name, make in (
            *((price, priced(settings, price=price)) for price in PRICES),
            ("bear", bear(settings)),
        )
    }
    ours = shares[PRICES[0]]
    claim = "smallest share of its seed's fluid bound that priced_bear reaches"
    rows = [row("A20", claim, setting, min(ours), at_least=_MIN_BOUND_SHARE)]
    for price in PRICES:
        words = f"mean share of the fluid bound that priced_bear with price {price} reaches"
        rows.append(row(f"A20-{price}", words, setting, t_interval(shares[price])))
    rows.append(row("A20-bear", "mean share of the fluid bound that bear reaches", setting, t_interval(shares["bear"])))
    for price in PRICES[1:]:
        words = f"share of the fluid bound with price {price} less that with {PRICES[0]}"
        rows.append(row(f"A20-{price}-less", words, setting, paired_interval(shares[price], ours)))
    return rows


GROUPS = (
    Group("A18", _gain_needs, _gain_rows),
    Group("A20", _bound_needs, _bound_rows),
)
