"""The other ends of ZeroMQ snapshots: a publisher in a process of its own, and a TCP proxy that holds or cuts bytes."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from headway.snapshot.zeromq import ZeroMQSubscriber
from headway.types import Snapshot

#: Reads lines "FIRST LAST NUM_WAITING PAUSE_S" and publishes that range of sequence numbers; answers "done SECONDS".
_PUBLISHER = """
import sys, time
import msgspec
from headway.snapshot.zeromq import ZeroMQPublisher
from headway.testing import snapshot, waiting_request
address, start, shift_s, host = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), bytes.fromhex(sys.argv[4])
clock = lambda: time.monotonic() + shift_s
publisher = ZeroMQPublisher(address, clock=clock, host=host or None)
print(publisher.address, flush=True)
for line in sys.stdin:
    first, last, num_waiting, pause_s = line.split()
    waiting = [
        msgspec.structs.replace(waiting_request(f"chatcmpl-{i:032d}", 100), arrival_s=clock())
        for i in range(int(num_waiting))
    ]
    shown = snapshot(waiting=waiting)
    started_s = time.monotonic()
    for sequence in range(int(first), int(last) + 1):
        now_s = clock()
        publisher.publish(msgspec.structs.replace(
            shown, sequence=sequence, engine_start=start, engine_s=now_s, batch_start_s=now_s - 0.001))
        if float(pause_s):
            time.sleep(float(pause_s))
    print("done", time.monotonic() - started_s, flush=True)
publisher.close()
"""


class PublisherProcess:
    """An engine's publisher as a process. ``shift_s`` sets its clock apart, ``host`` says on which machine it runs."""

    def __init__(
        self, address: str = "tcp://127.0.0.1:0", *, start: int = 1, shift_s: float = 0.0, host: bytes = b""
    ) -> None:
        command = [sys.executable, "-W", "error", "-c", _PUBLISHER, address, str(start), str(shift_s), host.hex()]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.address = self._answer()

    def begin(self, first: int, last: int, *, num_waiting: int = 1, pause_s: float = 0.0) -> None:
        """Start to publish these sequence numbers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {last} {num_waiting} {pause_s}\n")
        self.process.stdin.flush()

    def publish(self, first: int, last: int | None = None, *, num_waiting: int = 1) -> float:
        """Publish them and return the seconds that took."""
        self.begin(first, first if last is None else last, num_waiting=num_waiting)
        return self.done()

    def done(self) -> float:
        """Wait for the end of what was begun; the seconds it took."""
        return float(self._answer().split()[1])

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> str:
        """Let it end by itself; what stood on stderr."""
        return self.process.communicate(timeout=20)[1]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.strip()


def poll_until(
    subscriber: ZeroMQSubscriber, condition: Callable[[Snapshot], bool], *, within_s: float = 15.0
) -> list[Snapshot]:
    """Every new snapshot up to the first for which ``condition`` holds."""
    seen, deadline_s = [], time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        snapshot = subscriber.poll()
        if snapshot is None:
            select.select([subscriber.fileno()], [], [], 0.01)
            continue
        seen.append(snapshot)
        if condition(snapshot):
            return seen
    raise AssertionError(f"not seen among {len(seen)} snapshots, the last {seen[-1:]}")


class Proxy:
    """A TCP proxy in front of a publisher. Bytes to the subscriber wait while :meth:`hold` is in force."""

    def __init__(self, address: str) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut_after: int | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(self) -> None:
        """Pass nothing on to the subscriber until :meth:`let_go`."""
        self._flowing.clear()

    def let_go(self) -> None:
        """Pass on what was held, and all that follows."""
        self._flowing.set()

    def cut_after(self, num_bytes: int) -> None:
        """Pass on so many more bytes to the subscriber, then break the connection. Later ones are whole again."""
        self._cut_after = num_bytes

    def close(self) -> None:
        """Break every connection and stop."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flowing.set()
        for pair in self._pairs:
            _break(*pair)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the publisher is away: so is the proxy
                near.close()
                continue
            self.num_connections += 1
            self._pairs.append((near, far))
            for source, sink, is_down in ((far, near, True), (near, far, False)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_down), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_down:
                    self._flowing.wait()
                if is_down and self._cut_after is not None:
                    data, self._cut_after = data[: self._cut_after], self._cut_after - len(data)
                    if self._cut_after <= 0:
                        self._cut_after = None
                        sink.sendall(data)
                        break
                sink.sendall(data)
        _break(source, sink)


def _break(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
