"""vLLM schedulers that publish their state: ``--scheduler-cls headway.engines.vllm.PublishingScheduler``.

Each is vLLM's own scheduler, decision for decision, which after every ``schedule()`` and every update also shows what
it holds, over shared memory or ZeroMQ, and can log its steps for ``headway calibrate``. What it does is set by
environment variables (``docs/vllm-plugin.md``); with none of them set it is vLLM's scheduler and nothing else. It
refuses to be in the engine's way: whatever goes wrong here is counted, logged once, and never raised. Importing this
file loads no vLLM, so that everything but the two classes can be used and tested without one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from headway.engines.vllm_publisher import EnginePublisher, start_publisher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.engines.vllm_state import VllmRequest, VllmSchedulerOutput, VllmStepOutputs

    class PublishingScheduler:
        """For engines with ``async_scheduling`` off (the default on CPU)."""

    class AsyncPublishingScheduler:
        """For engines with ``async_scheduling`` on (the default on GPU)."""

    class _Scheduler:
        """What is overridden of vLLM's scheduler, ``vllm/v1/core/sched/scheduler.py`` @ 0.32.0."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def schedule(self, *args: object, **kwargs: object) -> VllmSchedulerOutput: ...
        def update_from_output(
            self, scheduler_output: VllmSchedulerOutput, model_runner_output: object
        ) -> Mapping[int, VllmStepOutputs]: ...
        def add_request(self, request: VllmRequest) -> None: ...
        def finish_requests(self, request_ids: object, finished_status: object) -> list[VllmRequest]: ...
        def _preempt_request(self, request: VllmRequest, *args: object, **kwargs: object) -> None: ...
        def shutdown(self) -> None: ...
else:
    _Scheduler = object

__all__ = ["AsyncPublishingScheduler", "PublishingScheduler"]

_BASES: Final = {
    "PublishingScheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "AsyncPublishingScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}


class Publishing(_Scheduler):
    """The part in front of vLLM's scheduler: calls it, then says what came of it."""

    _headway: EnginePublisher | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._headway = start_publisher(self, os.environ)

    def schedule(self, *args: object, **kwargs: object) -> VllmSchedulerOutput:
        """vLLM's ``schedule()``, then a snapshot of it."""
        publisher = self._headway
        if publisher is None:
            return super().schedule(*args, **kwargs)
        publisher.scheduling()
        start_s = time.monotonic()
        output = super().schedule(*args, **kwargs)
        publisher.scheduled(output, start_s)
        return output

    def update_from_output(
        self, scheduler_output: VllmSchedulerOutput, model_runner_output: object
    ) -> Mapping[int, VllmStepOutputs]:
        """vLLM's ``update_from_output()``, then a snapshot of it."""
        end_s = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._headway is not None:
            self._headway.updated(scheduler_output, outputs, end_s)
        return outputs

    def add_request(self, request: VllmRequest) -> None:
        """vLLM's ``add_request()``; the request is shown with the next step."""
        super().add_request(request)
        if self._headway is not None:
            self._headway.added(request)

    def finish_requests(self, request_ids: object, finished_status: object) -> list[VllmRequest]:
        """vLLM's ``finish_requests()``: what was cancelled is gone from the next snapshot."""
        aborted = super().finish_requests(request_ids, finished_status)
        if self._headway is not None:
            self._headway.aborted(aborted)
        return aborted

    def _preempt_request(self, request: VllmRequest, *args: object, **kwargs: object) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._headway is not None:
            self._headway.preempted(request)

    def shutdown(self) -> None:
        """vLLM's ``shutdown()``, once segment, socket and log are closed."""
        if self._headway is not None:
            self._headway.close()
        super().shutdown()


def __getattr__(name: str) -> type:
    """The scheduler classes, made when first asked for: only then is vLLM imported (PEP 562)."""
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, base = _BASES[name]
    made = type(name, (Publishing, getattr(import_module(module), base)), {"__module__": __name__})
    made.__doc__ = f"vLLM's {base}, which also publishes its state and can log its steps."
    globals()[name] = made
    return made
