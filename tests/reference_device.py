"""A decode worker one iteration at a time: what the closed forms of the lab's device must come to."""

from __future__ import annotations

from collections import deque

from headway.lab.queue_device import DeviceSpec


class Running:
    def __init__(self, request: int, prompt: int, output: int) -> None:
        self.request, self.prompt, self.output = request, prompt, output
        self.done = 0
        self.prefilling = False

    def held(self) -> int:
        """KV tokens during its next iteration."""
        return self.prompt + self.done + (0 if self.prefilling else 1)


class ReferenceDevice:
    """Plays arrivals ``(time, request, prompt, output)`` to the end; ends and first tokens by request."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.queue: deque[Running] = deque()
        self.running: list[Running] = []
        self.joined: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.num_preemptions = 0

    def play(self, arrivals: list[tuple[float, int, int, int]]) -> None:
        pending = deque(sorted(arrivals))
        now = 0.0
        while pending or self.queue or self.running:
            if not self.queue and not self.running:
                now = max(now, pending[0][0])
            while pending and pending[0][0] <= now + 1e-9:
                _, request, prompt, output = pending.popleft()
                self.queue.append(Running(request, prompt, output))
            if not self._preempt():
                self._join(now)
            now += self._duration()
            for one in list(self.running):
                self.first_token.setdefault(one.request, now)
                if one.prefilling:
                    one.prefilling = False
                    continue
                one.done += 1
                if one.done == one.output:
                    self.running.remove(one)
                    self.ended[one.request] = now

    def _preempt(self) -> bool:
        any_sent = False
        while len(self.running) > 1 and sum(one.held() for one in self.running) > self.spec.kv_tokens:
            one = self.running.pop()
            one.prefilling = False
            self.queue.appendleft(one)
            self.num_preemptions += 1
            any_sent = True
        return any_sent

    def _join(self, now: float) -> None:
        while self.queue and len(self.running) < self.spec.max_num_seqs:
            one = self.queue[0]
            one.prefilling = self.spec.mixing
            if self.running and sum(other.held() for other in self.running) + one.held() > self.spec.kv_tokens:
                one.prefilling = False
                return
            self.queue.popleft()
            self.running.append(one)
            self.joined.setdefault(one.request, now)

    def _duration(self) -> float:
        time, num = self.spec.time, len(self.running)
        context = sum(one.held() for one in self.running) - num
        prompts = sum(one.prompt + one.done for one in self.running if one.prefilling)
        return time.fixed + time.per_sequence * num + time.per_token * context + time.per_prompt_token * prompts
