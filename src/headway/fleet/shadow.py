"""An engine that shows nothing, replayed from what its router sent there and saw coming back.

Every request sent is submitted to a replayed engine in which answers never end by prediction: what ends them is seen.
Time is corrected by what the streams show. A first token ends the batch that gave it, so it puts the replay's clock
right, both ways: a replay that is behind catches up, one that is ahead stands still until the token it has promised
comes. Between first tokens the newest event of any stream tells when the last batch ended, and counts of events tell
how far each answer is. So an error made once does not stay. This file is pure: it takes ``now`` and reads no clock; and
it refuses to go on replaying an engine that has stopped to answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from headway._core import LengthRule, ReplayedEngine, TokenBatch, batch_time_s
from headway.errors import EngineInputError
from headway.fleet.view import LedgerEntry
from headway.types import MAX_COUNT, EngineLimits, EngineRequest, EngineState, StepTime

#: Events this close, in seconds, are the same moment.
TIE_S = 1e-6
#: A promised first token may be this late, seconds, or as late again as it was to take, before the replay is given up.
GIVE_UP_S = 2.0
#: Other streams' events this long, in seconds, after a promised first token show that its stream keeps it back.
_HELD_BACK_S = 0.5
#: An answer whose count is this many tokens, or this share, off is put right.
_COUNT_SLACK, _COUNT_SLACK_SHARE = 8, 0.1
#: A phase error below this share of a step is left alone.
_PHASE_SLACK_SHARE = 0.02
#: An engine this many steps ahead of its replay is given the missing first token without further steps.
_MAX_CATCH_UP_STEPS = 256
#: So many readings of the blocks in use have to agree.
_NUM_READINGS = 5
#: Events of a stream say something of the tokens behind an event from here on.
_MIN_EVENTS, _RATIO_WEIGHT = 16, 0.1


class Shadow:
    """The replay of one engine from one router's dispatches. ``clock_scale`` stretches its step times.

    ``at_s`` is the time at which it stands, always between two steps: after now while a batch is in flight.
    """

    def __init__(self, limits: EngineLimits, step_time: StepTime) -> None:
        self.limits, self.step_time = limits, step_time
        self.clock_scale = 1.0
        self.at_s = 0.0
        self.tokens_per_event = 1.0
        self.num_hidden_blocks = 0  # in use beyond those of the replay, by the last gauges
        self._hidden: deque[int] = deque([0] * _NUM_READINGS, maxlen=_NUM_READINGS)
        self._engine = ReplayedEngine(limits, step_time)
        self._unanswered: set[str] = set()  # streamed, and not yet given their first token by the replay
        self._promised: dict[str, LedgerEntry] = {}  # given theirs by the replay, and not yet seen
        self._entries: dict[str, LedgerEntry] = {}
        self._is_in_phase = False  # since the last batch with first tokens, one of these was seen
        self._step_s: float | None = None  # of the batch in flight, where it was replayed by itself
        self._next_step_s: float | None = 0.0  # of the batch that an asynchronous engine has scheduled behind it

    # ------------------------------------------------------------ what the router does and sees

    def sent(self, entry: LedgerEntry, now: float) -> None:
        """A request goes out.

        Raises:
            EngineInputError: no engine of these limits could take it; it is not part of the replay.
        """
        self.advance(now)
        if not self._engine.num_running and not self._engine.num_waiting:
            self.at_s = max(self.at_s, now)  # an idle engine begins at once
        self._engine.submit(request_of(entry, MAX_COUNT))
        self._entries[entry.request_id] = entry
        if entry.is_streamed:
            self._unanswered.add(entry.request_id)

    def take_over(self, entry: LedgerEntry, now: float) -> None:
        """A request that was sent earlier, by another shadow's account; it decodes where its stream has begun.

        Raises:
            EngineInputError: as :meth:`sent`.
        """
        self.sent(entry, now)
        if entry.first_token_s is not None:
            self._unanswered.discard(entry.request_id)
            self._reload({entry.request_id: max(1, round(entry.num_events * self.tokens_per_event))})

    def first_token(self, entry: LedgerEntry, now: float) -> None:
        """A stream brought its first token: at this moment the batch that gave it had just ended."""
        self.advance(now)
        name = entry.request_id
        if name in self._promised:
            del self._promised[name]
        elif name in self._unanswered:
            self._catch_up(name)
            self._promised.pop(name, None)
        else:
            return
        if not self._is_in_phase:
            self._is_in_phase, self.at_s = True, now

    def ended(self, entry: LedgerEntry, now: float, output_tokens: int | None = None) -> None:
        """A request is over, whatever its end; ``output_tokens`` is what its engine reported, None where it did not."""
        self.advance(now)
        name = entry.request_id
        self._engine.cancel(name)
        self._entries.pop(name, None)
        self._unanswered.discard(name)
        if self._promised.pop(name, None) is not None and not self._promised:
            self.at_s = max(self.at_s, now)  # what the engine did while the token failed to come, nobody knows
        if output_tokens is not None and entry.num_events >= _MIN_EVENTS:
            ratio = min(max(output_tokens / entry.num_events, 1.0), 16.0)
            self.tokens_per_event += _RATIO_WEIGHT * (ratio - self.tokens_per_event)

    def gauged(self, num_used_blocks: int, now: float) -> None:
        """Take in the engine's own count of blocks in use, at ``now``.

        What all of the last readings show beyond the replay's own is believed; a single one may lie a batch beside the
        replay, and a batch can take thousands of blocks.
        """
        self.advance(now)
        self._hidden.append(num_used_blocks - self.own()[2])
        self.num_hidden_blocks = max(min(self._hidden), 0)

    def restart(self, now: float, sent_before_s: float = math.inf) -> None:
        """The engine was started anew: what it had been sent before ``sent_before_s`` is gone."""
        for name in [name for name, entry in self._entries.items() if entry.booked_s < sent_before_s]:
            self._engine.cancel(name)
            del self._entries[name]
            self._unanswered.discard(name)
            self._promised.pop(name, None)
        self.at_s = now
        self._hidden.extend([0] * _NUM_READINGS)
        self.num_hidden_blocks = 0

    # ------------------------------------------------------------ the replay

    def advance(self, now: float) -> None:
        """Replay up to the batch in flight at ``now``, but not past a first token that has not come."""
        engine = self._engine
        while self.at_s < now - TIE_S and not self._promised:
            if not self._unanswered:
                engine.advance((now - TIE_S - self.at_s) / self.clock_scale)
                self.at_s = now - TIE_S + engine.residual_s * self.clock_scale
                engine.advance(engine.residual_s)
                self._step_s = self._next_step_s = None
                return
            batch = self._step()
            if not batch.time_s and not self._next_step_s:
                self.at_s = now  # idle, or nothing of it can run
                return
            self._take(batch)

    def overdue_s(self, now: float) -> float:
        """How long the replay has been waiting for a first token that it expected, 0 while it is not."""
        return max(0.0, now - self.at_s) if self._promised else 0.0

    def has_given_up(self, now: float) -> bool:
        """Whether a first token is so late that the engine is doing something else than the replay."""
        if not self._promised:
            return False
        took_s = self.at_s - min(entry.booked_s for entry in self._promised.values())
        return self.overdue_s(now) > max(GIVE_UP_S, took_s)

    def state(
        self,
        rule: LengthRule,
        now: float,
        others: tuple[Sequence[EngineRequest], Sequence[EngineRequest]] = ((), ()),
    ) -> EngineState:
        """The engine between steps as it stands at ``now``, every answer as long as ``rule`` expects it to become.

        ``others`` are running and waiting requests to be counted in front of these. A first token that is late by some
        time is expected to take as long again. O(requests).
        """
        self.advance(now)
        self._let_go(now)
        here = self._engine.state()
        self._heed_events(here.running, now)
        if self._put_counts_right(here):
            here = self._engine.state()
        return replace(
            here,
            running=[*others[0], *(self._expected(resident, rule) for resident in here.running)],
            waiting=[*others[1], *(self._expected(resident, rule) for resident in here.waiting)],
            residual_s=max(self.at_s - now, self.overdue_s(now)) / self.clock_scale,
            free_blocks=None if others[0] else max(self._engine.free_blocks - self.num_hidden_blocks, 0),
        )

    def own(self) -> tuple[int, int, int]:
        """Running requests, waiting requests, and blocks held, as replayed."""
        engine = self._engine
        return engine.num_running, engine.num_waiting, self.limits.num_blocks - 1 - engine.free_blocks

    def _step(self) -> TokenBatch:
        """One step, and how long the batch takes whose end it brings: asynchronous ones are scheduled a batch ahead."""
        if not self.limits.async_scheduling:
            batch = self._engine.step()
            self._step_s = batch.time_s * self.clock_scale
            return batch
        if self._next_step_s is None:
            here = self._engine.state()
            chunks = [_scheduled(one) for one in here.running if one.scheduled_tokens] + list(here.departed)
            self._next_step_s = batch_time_s(self.step_time, chunks) * self.clock_scale if chunks else 0.0
        self._step_s = self._next_step_s
        batch = self._engine.step()
        self._next_step_s = batch.time_s * self.clock_scale
        return batch

    def _take(self, batch: TokenBatch) -> None:
        self.at_s += self._step_s or 0.0
        for name in batch.first_tokens:
            if name in self._unanswered:
                self._unanswered.remove(name)
                entry = self._entries[name]
                if entry.first_token_s is None:
                    self._promised[name] = entry
                    self._is_in_phase = False

    def _catch_up(self, name: str) -> None:
        """Step on until the replay, too, gives this first token; where it cannot, put the request where it must be."""
        for _ in range(_MAX_CATCH_UP_STEPS):
            batch = self._step()
            if not batch.time_s and not self._next_step_s:
                break
            self._take(batch)
            if name not in self._unanswered:
                self._is_in_phase = False
                return
        self._unanswered.discard(name)
        self._is_in_phase = False
        self._reload({name: 1})

    # ------------------------------------------------------------ corrections

    def _let_go(self, now: float) -> None:
        """Go on without promised first tokens where other streams show that the engine does."""
        if not self._promised:
            return
        newest_s = max([entry.last_event_s for entry in self._entries.values()])
        took_s = self.at_s - min(entry.booked_s for entry in self._promised.values())
        if newest_s > self.at_s + max(_HELD_BACK_S, took_s / 2):
            self._promised.clear()
            self.at_s = newest_s
            self.advance(now)

    def _heed_events(self, running: Sequence[EngineRequest], now: float) -> None:
        """Let the newest events of all streams tell when the last batch ended."""
        if self._promised or self.at_s <= now + TIE_S:
            return  # its first tokens will tell, or it is between two batches
        newest_s = max([entry.last_event_s for entry in self._entries.values()], default=-math.inf)
        step_s = self._decode_step_s(running) if self._step_s is None else self._step_s
        if step_s <= 0.0 or newest_s + 2 * step_s < now:
            return  # nothing decodes, or nothing is seen of it
        # Of a batch's events the first was the least on its way. The next batch cannot have ended: it would have shown.
        began_s = min([one.last_event_s for one in self._entries.values() if one.last_event_s > newest_s - step_s / 2])
        ends_s = max(began_s + step_s, now)
        if abs(ends_s - self.at_s) > _PHASE_SLACK_SHARE * step_s:
            self.at_s = ends_s

    def _decode_step_s(self, running: Sequence[EngineRequest]) -> float:
        """How long the batch in flight takes, where it holds decodes only; 0 where there are none."""
        chunks = [(1, one.computed_tokens - one.scheduled_tokens - 1, True) for one in running if one.output_tokens]
        return batch_time_s(self.step_time, chunks) * self.clock_scale if chunks else 0.0

    def _put_counts_right(self, here: EngineState) -> bool:
        """Give answers that are clearly longer or shorter than replayed their own count; whether there were any."""
        if self._promised:
            return False  # the replay stands still, and counts with it
        wrong: dict[str, int] = {}
        for resident in here.running:
            entry = self._entries[resident.request_id]
            if not entry.num_events or not resident.output_tokens:
                continue
            seen = round(entry.num_events * self.tokens_per_event)
            if abs(resident.output_tokens - seen) > max(_COUNT_SLACK, _COUNT_SLACK_SHARE * seen):
                wrong[resident.request_id] = seen
        if wrong:
            self._reload(wrong)
        return bool(wrong)

    def _reload(self, outputs: Mapping[str, int]) -> None:
        """Put the replay into its own state but for these requests, which are running with so many outputs."""
        here = self._engine.state()
        running = [_with_outputs(one, outputs.get(one.request_id)) for one in here.running]
        running += [_with_outputs(one, outputs[one.request_id]) for one in here.waiting if one.request_id in outputs]
        waiting = [one for one in here.waiting if one.request_id not in outputs]
        try:
            self._engine.load(replace(here, running=running, waiting=waiting, free_blocks=None))
        except EngineInputError:
            self._engine.load(here)  # more than fits: the counts are wrong together, and stay as they are

    def _expected(self, resident: EngineRequest, rule: LengthRule) -> EngineRequest:
        entry = self._entries[resident.request_id]
        target = rule.target_tokens(
            entry.predicted_output_tokens, resident.prompt_tokens, resident.output_tokens, entry.max_tokens or 0
        )
        return replace(resident, target_output_tokens=target)


def request_of(entry: LedgerEntry, target_output_tokens: int) -> EngineRequest:
    """A ledger entry as the engine gets it.

    Raises:
        EngineInputError: a count that no engine takes.
    """
    return EngineRequest(
        request_id=entry.request_id,
        prompt_tokens=entry.prompt_tokens,
        target_output_tokens=target_output_tokens,
        max_tokens=entry.max_tokens,
        priority=entry.priority,
        cached_tokens=entry.cached_tokens,
        shared_blocks=entry.shared_blocks,
    )


def _with_outputs(resident: EngineRequest, output_tokens: int | None) -> EngineRequest:
    """The request as a decode with so many outputs; itself where None."""
    if output_tokens is None:
        return resident
    computed = resident.prompt_tokens + output_tokens - 1
    return replace(resident, computed_tokens=computed, output_tokens=output_tokens, scheduled_tokens=0, num_blocks=None)


def _scheduled(resident: EngineRequest) -> tuple[int, int, bool]:
    """The request's chunk of the batch that is scheduled: tokens, context before them, whether it decodes."""
    tokens, context = resident.scheduled_tokens, resident.computed_tokens - resident.scheduled_tokens
    return tokens, context, tokens == 1 and context >= resident.prompt_tokens
