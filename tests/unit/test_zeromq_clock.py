"""The offset of another host's clock, from messages alone: as good as the promptest of them, whatever was held up."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.snapshot.clock import HOST_BYTES, LEAST_MESSAGES, WINDOW_S, ClockOffset, host_identity

delays = st.floats(0, 5)
gaps = st.floats(0.001, 60)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(gaps, delays), min_size=1, max_size=60))
def test_the_error_is_the_least_delay_of_what_is_remembered(
    true_offset_s: float, steps: list[tuple[float, float]]
) -> None:
    """Between steady clocks the offset exceeds the true one by at most the least delay of the last window."""
    clock = ClockOffset()
    sent_s, seen = 2e6, []
    for gap_s, delay_s in steps:
        sent_s += gap_s + 5.0  # messages of one connection never overtake each other
        received_s = sent_s + true_offset_s + delay_s
        offset_s = clock.observe(sent_s, received_s)
        seen.append((received_s, delay_s))
        recent = [delay for at_s, delay in seen if received_s - at_s <= WINDOW_S]
        error_s = offset_s - true_offset_s
        assert -1e-6 <= error_s <= min(recent) + 1e-6
        assert offset_s <= received_s - sent_s


def test_a_message_that_was_held_up_changes_nothing() -> None:
    """One late message among prompt ones, and the first after an hour of silence, do not make old states look young."""
    clock = ClockOffset()
    for second in range(20):
        assert clock.observe(float(second), second + 100.001) == pytest.approx(100.001)
    assert clock.observe(20.0, 128.0) == pytest.approx(100.001)
    assert clock.observe(3600.0, 3740.0) == pytest.approx(100.001)


def test_clocks_that_part_are_followed() -> None:
    """Clocks that run 100 millionths apart are known within 4 ms at any time, in either direction."""
    for drift in (-1e-4, 1e-4):
        clock, delay = ClockOffset(), random.Random(1)
        for second in range(0, 3600):
            received_s = second * (1 + drift) + 50 + delay.expovariate(1 / 0.0005)
            offset_s = clock.observe(float(second), received_s)
            assert abs(offset_s - (50 + second * drift)) < 0.004


def test_a_clock_that_stood_still_is_found_again() -> None:
    """A suspended host's clock lags by the length of its sleep: noticed within the window, not never."""
    clock = ClockOffset()
    for second in range(60):
        clock.observe(float(second), second + 10.0)
    offsets = [clock.observe(float(second), second + 25.0) for second in range(60, 100)]
    assert offsets[0] == 10.0
    assert offsets[int(WINDOW_S)] == 25.0


def test_few_messages_do_not_displace_a_prompt_one() -> None:
    """After a silence longer than the window it takes several messages to outweigh what was known."""
    clock = ClockOffset()
    clock.observe(0.0, 10.0)
    offsets = [clock.observe(1000.0 + second, 1012.0 + second) for second in range(LEAST_MESSAGES)]
    assert offsets == [10.0] * (LEAST_MESSAGES - 1) + [12.0]


def test_another_clock_begins_anew() -> None:
    """What was known of one host says nothing of the next."""
    clock = ClockOffset()
    clock.observe(0.0, 10.0)
    clock.forget()
    assert clock.observe(0.0, 5000.0) == 5000.0


def test_processes_of_one_machine_know_each_other() -> None:
    """Two processes of one boot have one identity, and it has the length that the wire gives it."""
    program = "from headway.snapshot.clock import host_identity; print(host_identity().hex())"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    assert other == host_identity().hex()
    assert len(host_identity()) == HOST_BYTES
