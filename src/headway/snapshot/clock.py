"""Whose clock a snapshot was written by, and what has to be added to its times to read them on this one.

Monotonic clocks of two hosts count from unlike starts and drift apart by some ten millionths. Nobody here asks the
other side for its time: every message says when it was sent, and the one that came with the least delay says most.
So the offset is found up to that least one-way delay, by which snapshots look younger than they are; on a local
network that is a fraction of a millisecond. It refuses to guess when both processes run on one host: there the offset
is nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from collections import deque
from pathlib import Path

from msgspec import Struct

#: How long a message bears witness, seconds. Clocks 100 millionths apart part by 3 ms meanwhile.
WINDOW_S = 30.0
#: So many messages must have come since the least delayed one before it may be forgotten.
LEAST_MESSAGES = 8

HOST_BYTES = 16


@functools.cache
def host_identity() -> bytes:
    """Sixteen bytes that are equal exactly where the monotonic clock is: one boot of one kernel, one time namespace.

    Where the kernel does not tell, they are drawn at random, so that no other process is taken to share the clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return secrets.token_bytes(HOST_BYTES)
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without time namespaces has one clock
        namespace = ""
    return hashlib.sha256(boot + namespace.encode()).digest()[:HOST_BYTES]


class _Message(Struct, frozen=True):
    number: int
    received_s: float
    difference_s: float


class ClockOffset:
    """The offset of one sender's clock: the least (received − sent) over the last messages."""

    def __init__(self, *, window_s: float = WINDOW_S, least_messages: int = LEAST_MESSAGES) -> None:
        self._window_s = window_s
        self._least_messages = least_messages
        self._messages: deque[_Message] = deque()  # differences rise from left to right, and so do times
        self._num_messages = 0

    def observe(self, sent_s: float, received_s: float) -> float:
        """Take a message sent at ``sent_s`` (their clock) and received at ``received_s`` (ours); returns the offset.

        A message that was held up changes nothing while a prompter one is remembered. That one is remembered for the
        window, and through any silence until enough others have come: the first after a silence may be a late one.
        """
        difference_s = received_s - sent_s
        messages = self._messages
        self._num_messages += 1
        while messages and messages[-1].difference_s >= difference_s:
            messages.pop()
        messages.append(_Message(self._num_messages, received_s, difference_s))
        while (
            received_s - messages[0].received_s > self._window_s
            and self._num_messages - messages[0].number >= self._least_messages
        ):
            messages.popleft()
        return messages[0].difference_s

    def forget(self) -> None:
        """Begin anew: the sender runs on another clock."""
        self._messages.clear()
