"""Snapshots through ZeroMQ: whoever comes, goes, dies, sleeps or talks rubbish, a reader gets the newest or nothing."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq

from headway.errors import ConfigError, SnapshotError, SnapshotVersionError
from headway.snapshot import wire, zeromq
from headway.snapshot.clock import host_identity
from headway.snapshot.zeromq import ZeroMQPublisher, ZeroMQSubscriber, seal
from headway.testing import snapshot, waiting_request
from headway.types import Snapshot
from zeromq_peers import Proxy, PublisherProcess, poll_until

ELSEWHERE = bytes(range(16))


@pytest.fixture
def start() -> Iterator[Callable[..., PublisherProcess]]:
    """Starts publisher processes and ends them with the test."""
    started: list[PublisherProcess] = []

    def start_one(*args: object, **options: object) -> PublisherProcess:
        started.append(PublisherProcess(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for publisher in started:
        publisher.kill()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., ZeroMQSubscriber]]:
    """Makes subscribers and closes them with the test."""
    made: list[ZeroMQSubscriber] = []

    def subscribe_one(address: str, **options: object) -> ZeroMQSubscriber:
        made.append(ZeroMQSubscriber(address, **options))  # type: ignore[arg-type]
        return made[-1]

    yield subscribe_one
    for subscriber in made:
        subscriber.close()


@pytest.fixture
def proxies() -> Iterator[Callable[[str], Proxy]]:
    """Puts proxies before addresses and closes them with the test."""
    made: list[Proxy] = []

    def proxy_of(address: str) -> Proxy:
        made.append(Proxy(address))
        return made[-1]

    yield proxy_of
    for proxy in made:
        proxy.close()


Start = Callable[..., PublisherProcess]
Subscribe = Callable[..., ZeroMQSubscriber]


def test_another_process_is_read_in_order_each_snapshot_once(start: Start, subscribe: Subscribe) -> None:
    """Sequence numbers only rise, the last one comes, nothing comes twice, and times of one host stay as they are."""
    publisher = start()
    subscriber = subscribe(publisher.address, instance_id="h100-a")
    assert subscriber.poll() is None
    publisher.publish(1)
    poll_until(subscriber, lambda shown: shown.sequence == 1)
    before_s = time.monotonic()
    publisher.begin(2, 200, num_waiting=5, pause_s=0.001)
    seen = poll_until(subscriber, lambda shown: shown.sequence == 200)
    publisher.done()
    after_s = time.monotonic()
    assert len(seen) > 20
    assert all(early.sequence < late.sequence for early, late in pairwise(seen))
    assert {shown.instance_id for shown in seen} == {"h100-a"}
    assert {len(shown.waiting) for shown in seen} == {5}
    assert all(before_s <= shown.engine_s <= after_s for shown in seen)
    assert subscriber.clock_offset_s == 0.0
    time.sleep(1.2 * zeromq.HEARTBEAT_S)  # what is sent again is no news
    assert subscriber.poll() is None
    assert publisher.end() == ""


def test_a_late_joiner_gets_the_whole_state_of_a_silent_engine(start: Start, subscribe: Subscribe) -> None:
    """A router that comes long after the last snapshot has it within a heartbeat or two, at its true age."""
    publisher = start()
    publisher.publish(1, num_waiting=7)
    published_s = time.monotonic()
    time.sleep(0.3)
    subscriber = subscribe(publisher.address)
    (shown,) = poll_until(subscriber, lambda shown: True, within_s=10 * zeromq.HEARTBEAT_S)
    assert (shown.sequence, len(shown.waiting)) == (1, 7)
    assert shown.engine_s <= published_s


def test_a_router_that_was_there_first_waits_for_its_engine(start: Start, subscribe: Subscribe) -> None:
    """An absent publisher is no error; its snapshots come when it does."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    subscriber = subscribe(f"tcp://127.0.0.1:{port}")
    for _ in range(5):
        assert subscriber.poll() is None
    start(f"tcp://127.0.0.1:{port}").publish(1)
    poll_until(subscriber, lambda shown: shown.sequence == 1)


def test_a_killed_engine_is_followed_into_its_next_life(start: Start, subscribe: Subscribe) -> None:
    """SIGKILL, then a new engine on the same port whose numbers begin anew, and whose start looks the earlier one."""
    first = start(start=200)
    subscriber = subscribe(first.address)
    first.publish(1)
    poll_until(subscriber, lambda shown: True)
    first.publish(50)
    poll_until(subscriber, lambda shown: shown.sequence == 50)
    first.kill()
    assert subscriber.poll() is None
    second = start(first.address, start=100)  # its wall clock was set back
    second.publish(1)
    (shown,) = poll_until(subscriber, lambda shown: True)
    assert (shown.engine_start, shown.sequence) == (100, 1)
    second.publish(2)
    poll_until(subscriber, lambda shown: shown.sequence == 2)


def test_a_reader_that_sleeps_stops_nobody_and_wakes_to_the_newest(start: Start, subscribe: Subscribe) -> None:
    """20,000 snapshots of 259 requests nobody reads: the engine sends them at full speed, little is kept of them, and
    the reader gets the last one all the same."""
    publisher = start()
    subscriber = subscribe(publisher.address)
    publisher.publish(1)
    poll_until(subscriber, lambda shown: True)
    alone = start().publish(1, 20_000, num_waiting=259)
    unread = publisher.publish(2, 20_001, num_waiting=259)
    assert unread < 10 * alone + 5
    kept = int(Path(f"/proc/{publisher.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert kept < 200e6  # the snapshots together have 400 MB
    seen = poll_until(subscriber, lambda shown: shown.sequence == 20_001)
    assert len(seen) < 200


def test_a_frozen_reader_leaves_the_engine_alone(start: Start) -> None:
    """A subscriber that is connected and reads not one byte holds nothing up; the heartbeat goes on to others."""
    publisher = start()
    host, port = publisher.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))):  # it never even greets
        assert publisher.publish(1, 2000, num_waiting=100) < 10
        subscriber = ZeroMQSubscriber(publisher.address)
        poll_until(subscriber, lambda shown: shown.sequence == 2000)
        subscriber.close()


def test_bytes_held_back_show_as_age(start: Start, subscribe: Subscribe, proxies: Callable[[str], Proxy]) -> None:
    """What the network held for a second arrives a second old, also from another host's clock: never as fresh."""
    publisher = start(shift_s=5000.0, host=ELSEWHERE)
    proxy = proxies(publisher.address)
    subscriber = subscribe(proxy.address)
    publisher.begin(1, 50, pause_s=0.01)
    poll_until(subscriber, lambda shown: shown.sequence == 50)
    publisher.done()
    proxy.hold()
    before_s = time.monotonic()
    publisher.publish(51)
    time.sleep(1.0)
    assert subscriber.poll() is None
    proxy.let_go()
    (shown,) = poll_until(subscriber, lambda shown: shown.sequence == 51)
    assert time.monotonic() - shown.engine_s >= 0.9
    assert shown.engine_s >= before_s - 0.001


def test_times_of_another_host_are_put_on_our_clock(start: Start, subscribe: Subscribe) -> None:
    """Clocks an hour and a half apart: engine time, batch start and arrivals come out right up to the least delay."""
    for shift_s in (5000.0, 1e6):
        publisher = start(shift_s=shift_s, host=ELSEWHERE)
        subscriber = subscribe(publisher.address)
        before_s = time.monotonic()
        publisher.begin(1, 100, num_waiting=3, pause_s=0.005)
        seen = poll_until(subscriber, lambda shown: shown.sequence == 100)
        after_s = time.monotonic()
        assert subscriber.clock_offset_s == pytest.approx(-shift_s, abs=0.2)
        for shown in seen:
            assert before_s <= shown.engine_s <= after_s
            assert shown.batch_start_s == pytest.approx(shown.engine_s - 0.001, abs=1e-6)
            assert all(before_s <= request.arrival_s <= shown.engine_s for request in shown.waiting)


def test_an_identity_that_lies_is_found_out(subscribe: Subscribe) -> None:
    """Two clones of one machine may share an identity and not a clock: a message from the future says so."""
    publisher = ZeroMQPublisher(
        "tcp://127.0.0.1:0", clock=lambda: time.monotonic() + 500.0, host=host_identity(), heartbeat_s=0.02
    )
    subscriber = subscribe(publisher.address)
    publisher.publish(snapshot(engine_s=time.monotonic() + 500.0))
    (shown,) = poll_until(subscriber, lambda shown: True)
    publisher.close()
    assert shown.engine_s <= time.monotonic()
    assert subscriber.clock_offset_s == pytest.approx(-500, abs=5)


def test_a_connection_cut_amid_a_message_delivers_no_half(
    start: Start, subscribe: Subscribe, proxies: Callable[[str], Proxy]
) -> None:
    """However far a message came before its connection broke, nothing of it is seen, and the next one comes whole."""
    publisher = start()
    proxy = proxies(publisher.address)
    subscriber = subscribe(proxy.address)
    publisher.publish(1, num_waiting=2000)
    poll_until(subscriber, lambda shown: True)
    for round_, num_bytes in enumerate((1, 9, 40, 20_000, 100_000), start=2):
        connections = proxy.num_connections
        proxy.cut_after(num_bytes)
        publisher.publish(round_, num_waiting=2000)
        seen = poll_until(subscriber, lambda shown, round_=round_: shown.sequence == round_)
        assert {len(shown.waiting) for shown in seen} == {2000}
        assert proxy.num_connections > connections


def received(subscriber: ZeroMQSubscriber) -> Snapshot | SnapshotError | None:
    """What the next message turns out to be."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            if (found := subscriber.poll()) is not None:
                return found
        except SnapshotError as error:
            return error
        select.select([subscriber.fileno()], [], [], 0.01)
    return None


def test_rubbish_is_named_and_passed_over(subscribe: Subscribe) -> None:
    """Foreign messages, other versions and broken bodies are each said once, clearly; the next good one is returned."""
    shown = snapshot()
    body, host = wire.encode(shown), host_identity()
    newer = bytearray(seal(body, 1.0, host))
    newer[3] = 2
    newer_wire = bytearray(body)
    newer_wire[3] = 9
    rubbish: list[tuple[bytes, type[SnapshotError], str]] = [
        (b"", SnapshotError, "no message of a Headway publisher"),
        (b"GET / HTTP/1.1\r\n\r\n" * 9, SnapshotError, "no message of a Headway publisher"),
        (body, SnapshotError, "no message of a Headway publisher"),
        (bytes(newer), SnapshotVersionError, "ZeroMQ envelope version 2"),
        (seal(bytes(newer_wire), 1.0, host), SnapshotVersionError, "wire version 9"),
        (seal(body[:-1], 1.0, host), SnapshotError, "checksum"),
        (seal(b"", 1.0, host), SnapshotError, "too few"),
    ]
    with zmq.Context() as context, context.socket(zmq.PUB) as foreign:
        foreign.setsockopt(zmq.LINGER, 0)
        port = foreign.bind_to_random_port("tcp://127.0.0.1")
        subscriber = subscribe(f"tcp://127.0.0.1:{port}")
        while subscriber.poll() is None:  # until it has subscribed
            foreign.send(seal(wire.encode(msgspec.structs.replace(shown, sequence=0)), 1.0, host))
            select.select([subscriber.fileno()], [], [], 0.01)
        subscriber.receive()
        subscriber._newest = None
        for sequence, (message, kind, words) in enumerate(rubbish, start=1):
            foreign.send(message)
            error = received(subscriber)
            assert isinstance(error, kind), (words, error)
            assert words in str(error)
            assert subscriber.poll() is None
            foreign.send(seal(wire.encode(msgspec.structs.replace(shown, sequence=sequence)), 1.0, host))
            good = received(subscriber)
            assert isinstance(good, Snapshot)
            assert good.sequence == sequence


FLOOD = """
import sys, time, zmq
context = zmq.Context()
publisher = context.socket(zmq.PUB)
print(publisher.bind_to_random_port("tcp://127.0.0.1"), flush=True)
end_s = time.monotonic() + 30
while time.monotonic() < end_s:
    publisher.send_multipart([b"a" * 10, b"b" * 100_000, b"c"])
"""


def test_a_flood_of_messages_in_parts_does_not_end_the_process() -> None:
    """Multi-part messages, on which libzmq's own conflation aborts, are rubbish like any other: two seconds of them."""
    reader = """
import sys, time
from headway.errors import SnapshotError
from headway.snapshot.zeromq import ZeroMQSubscriber
subscriber, num_errors, end_s = ZeroMQSubscriber(sys.argv[1]), 0, time.monotonic() + 2
while time.monotonic() < end_s:
    try:
        subscriber.poll()
    except SnapshotError:
        num_errors += 1
subscriber.close()
print(num_errors)
"""
    flood = subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, text=True)
    try:
        assert flood.stdout is not None
        address = f"tcp://127.0.0.1:{int(flood.stdout.readline())}"
        command = [sys.executable, "-W", "error", "-c", reader, address]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    finally:
        flood.kill()
        flood.communicate()
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


def test_bytes_that_are_no_zeromq_disturb_neither_side(start: Start, subscribe: Subscribe) -> None:
    """A web client at the publisher's port, and a web server at the subscriber's, are simply not understood."""
    publisher = start()
    port = int(publisher.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        good = subscribe(publisher.address)
        publisher.publish(1)
        poll_until(good, lambda shown: shown.sequence == 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        lost = subscribe(f"tcp://127.0.0.1:{server.getsockname()[1]}")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000))

        answering = threading.Thread(target=answer)
        answering.start()
        answering.join(10)
        assert not answering.is_alive()
        for _ in range(20):
            assert lost.poll() is None
            select.select([lost.fileno()], [], [], 0.01)


def test_what_does_not_fit_is_counted_and_the_older_one_stays(subscribe: Subscribe) -> None:
    """An oversized snapshot is never cut: the engine hears of it, and what was sent before it goes on being sent."""
    publisher = ZeroMQPublisher("tcp://127.0.0.1:0", heartbeat_s=0.02)
    publisher.publish(snapshot(sequence=1))
    huge = snapshot(sequence=2, waiting=[waiting_request("x" * 4_300_000, 10)])
    with pytest.raises(SnapshotError, match="do not fit"):
        publisher.publish(huge)
    assert publisher.num_failed == 1
    subscriber = subscribe(publisher.address)
    (shown,) = poll_until(subscriber, lambda shown: True)
    assert shown.sequence == 1
    publisher.close()


def test_a_port_in_use_is_refused(subscribe: Subscribe) -> None:
    """A second engine on one address is told so; the first is not disturbed."""
    publisher = ZeroMQPublisher("tcp://127.0.0.1:0", heartbeat_s=0.02)
    with pytest.raises(SnapshotError, match=r"cannot publish on tcp://127\.0\.0\.1:\d+: Address already in use"):
        ZeroMQPublisher(publisher.address)
    publisher.publish(snapshot())
    poll_until(subscribe(publisher.address), lambda shown: True)
    publisher.close()


def test_both_ends_may_be_closed_twice() -> None:
    """After close nothing is published and nothing is read, and the port is free again in a moment."""
    publisher = ZeroMQPublisher("tcp://127.0.0.1:0")
    subscriber = ZeroMQSubscriber(publisher.address)
    for _ in range(2):
        publisher.close()
        subscriber.close()
    with pytest.raises(SnapshotError, match=publisher.address):
        publisher.publish(snapshot())
    assert publisher.num_failed == 1
    assert subscriber.poll() is None
    bound_again(publisher.address).close()


def bound_again(address: str) -> ZeroMQPublisher:
    """A publisher on an address that was given back: libzmq closes sockets in a thread of its own."""
    for _ in range(500):
        try:
            return ZeroMQPublisher(address)
        except SnapshotError:
            threading.Event().wait(0.01)
    return ZeroMQPublisher(address)


def test_wrong_addresses_are_refused_before_any_socket() -> None:
    """Neither end starts on what is no address of its kind."""
    with pytest.raises(ConfigError):
        ZeroMQPublisher("ipc:///tmp/headway")
    with pytest.raises(ConfigError):
        ZeroMQSubscriber("tcp://*:7101")
