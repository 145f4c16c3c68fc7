"""Lab pools: estimator and truth side by side, copies by number, and pools that make no sense."""

from __future__ import annotations

import msgspec
import pytest

from headway.errors import ConfigError, ProfileError
from headway.lab.pool import QWEN3_CARDS, LabInstance, Pool, lab_instance, qwen3_pool
from headway.lab.truth import MODELS


def test_the_qwen3_pool_has_three_sizes() -> None:
    """One instance per size, each with its estimator's fit and another, true clock, at the published prices."""
    pool = qwen3_pool()
    assert pool.ids == ("h100-0.6b", "h100-8b", "h100-32b")
    assert pool.models == tuple(MODELS) == tuple(pool.cards)
    for one in pool.instances:
        assert one.instance.step_time is not None
        assert one.instance.calibration is not None
        assert one.instance.step_time.form == "linear"
        assert one.truth.step_time.form == "six_term"
        assert one.instance.limits == one.truth.limits
    prices = [(card.input_per_1m_usd, card.output_per_1m_usd) for card in pool.cards.values()]
    assert prices == [(0.044, 0.173), (0.072, 0.287), (0.287, 0.640)]


@pytest.mark.parametrize(("copies", "num"), [(1, 3), (21, 63), ((22, 21, 21), 64), ((0, 2, 0), 2)])
def test_copies_are_counted(copies: int | tuple[int, ...], num: int) -> None:
    """One number serves all sizes, three give each its own; every id is its own."""
    pool = qwen3_pool(copies)
    assert len(pool.instances) == len(set(pool.ids)) == num


def test_copies_are_numbered_by_size() -> None:
    """A size that stands once keeps its plain name."""
    assert qwen3_pool((2, 1, 0)).ids == ("h100-0.6b-1", "h100-0.6b-2", "h100-8b")


@pytest.mark.parametrize("copies", [-1, (1, 2), (1, 1, -1), 0])
def test_impossible_copies_are_refused(copies: int | tuple[int, ...]) -> None:
    """Negative or too few numbers, and no instance at all, name their key."""
    with pytest.raises(ConfigError, match=r"pool\.(copies|instances)"):
        qwen3_pool(copies)


def test_pools_that_make_no_sense_are_refused() -> None:
    """An id that stands twice, a model without a card, or an engine of other limits is an error with its place."""
    one = lab_instance("a", "qwen3-8b", "h100-qwen3-8b")
    with pytest.raises(ConfigError, match=r"instances\[1\]\.id: 'a' stands twice"):
        Pool(instances=(one, one), cards=QWEN3_CARDS)
    with pytest.raises(ConfigError, match=r"instances\[0\]\.model: model 'qwen3-8b' has no card"):
        Pool(instances=(one,), cards={})
    limits = msgspec.structs.replace(one.truth.limits, max_num_seqs=7)
    other = LabInstance(instance=msgspec.structs.replace(one.instance, limits=limits), truth=one.truth)
    with pytest.raises(ConfigError, match=r"instances\[0\]\.limits"):
        Pool(instances=(other,), cards=QWEN3_CARDS)
    with pytest.raises(ProfileError, match="did you mean"):
        lab_instance("a", "qwen3-8b", "h100-qwen3-8")
