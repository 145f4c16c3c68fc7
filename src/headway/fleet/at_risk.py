"""Who on an instance still waits for a first token that is expected in time, and what a newcomer would take from them.

A newcomer that joins a batch lengthens it for all whose first tokens that batch gives: they come together, at its end.
So each booking may push out the first tokens of those that wait already, and make some of them late. Times are those of
the replay when each request was booked. What is late already cannot be harmed, and is forgotten. This file refuses to
look at requests of other routers: it does not know their targets.
"""

from __future__ import annotations

#: Two times this close, in seconds, are the same moment: no token batch is as short.
_MOMENT_S = 1e-3


class _Waiting:
    """One request that is expected in time."""

    __slots__ = ("due_s", "expected_s", "utility")

    def __init__(self, expected_s: float, due_s: float, utility: float) -> None:
        self.expected_s, self.due_s, self.utility = expected_s, due_s, utility


class AtRisk:
    """The requests of one instance whose first token is still to come and expected in time. Times are monotonic."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request_id: str, start_s: float, end_s: float, due_s: float | None, utility: float | None) -> None:
        """Take in a request whose prefill is to start at ``start_s`` and to give its first token at ``end_s``.

        Those that wait for a batch of that time come no sooner than it. Without ``due_s`` or ``utility``, or when it is
        late itself or worth nothing, it only pushes out the others.
        """
        late = [
            name
            for name, one in self._waiting.items()
            if one.expected_s > start_s + _MOMENT_S and self._push(one, end_s) > one.due_s
        ]
        for name in late:
            del self._waiting[name]
        if due_s is not None and end_s <= due_s and utility is not None and utility > 0.0:
            self._waiting[request_id] = _Waiting(end_s, due_s, utility)

    def leave(self, request_id: str) -> None:
        """Forget a request: its first token came, or it is gone."""
        self._waiting.pop(request_id, None)

    def harm(self, start_s: float, end_s: float) -> float:
        """Σ utility of those that a newcomer with these times would make late. O(requests at risk)."""
        if not self._waiting:
            return 0.0
        start_s += _MOMENT_S
        return sum([one.utility for one in self._waiting.values() if one.expected_s > start_s and one.due_s < end_s])

    @staticmethod
    def _push(one: _Waiting, end_s: float) -> float:
        one.expected_s = max(one.expected_s, end_s)
        return one.expected_s
