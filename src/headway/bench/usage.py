"""What a process has used: CPU time to the nanosecond and resident memory, from Linux's ``/proc``.

``/proc/PID/stat`` counts CPU in hundredths of a second, too coarse for a few streams; the scheduler's own statistics
count nanoseconds per thread. Memory is the resident set, now and at its peak.
"""

from __future__ import annotations

import re
from pathlib import Path

_KB = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def cpu_s(pid: int) -> float:
    """CPU seconds of all living threads of a process. Raises FileNotFoundError when it is gone."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # a thread that ended meanwhile
            continue
    return total_ns * 1e-9


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory now and at its peak, in MB of 2**20 bytes."""
    found = {name: int(kb) / 1024 for name, kb in _KB.findall(Path(f"/proc/{pid}/status").read_text())}
    return found["VmRSS"], found["VmHWM"]


def reset_peak(pid: int) -> None:
    """Let the peak begin anew from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
