"""The network: stream sockets between hosts, with latency, cuts, resets and half-open links.

A stream neither loses nor reorders bytes; what can happen to it is delay, arrival in pieces, a break that both sides or
only one side hears of, and silence while the path is cut. A cut path holds what is sent until it heals, or until
keepalive gives up. A killed process's sockets are closed by its kernel, unless its host died too: then nobody says so.
"""

from __future__ import annotations

import socket as real
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvtool.sim.poll import Pollable
from kvtool.sim.sched import Process, Scheduler

BUFFER = 256 * 1024
"""Bytes on their way or unread, in one direction, before a sender has to wait."""
KEEPALIVE_S = 11.0
HANDSHAKE_S = 127.0
"""How long a connect to a silent host tries."""


@dataclass
class Delays:
    """Seconds one way: between processes of one host, between hosts, and how often and how far beyond that."""

    local_s: float = 30e-6
    remote_s: float = 200e-6
    spike_share: float = 0.01
    spike_s: float = 0.02


class Network:
    """All paths of one run."""

    def __init__(self, sched: Scheduler, delays: Delays) -> None:
        self.sched, self.delays = sched, delays
        self.listeners: dict[Any, Listener] = {}
        self.streams: list[Stream] = []
        self._cut: set[tuple[str, str]] = set()
        self._down: set[str] = set()
        self._ports = 30000
        self._numbers = 0

    def delay_s(self, here: str, there: str) -> float:
        rng, delays = self.sched.rng, self.delays
        base_s = delays.local_s if here == there else delays.remote_s
        if rng.random() < delays.spike_share:
            self.sched.journal.count("net: slow message")
            return base_s + rng.random() * delays.spike_s
        return base_s * (1 + rng.random())

    def is_cut(self, here: str, there: str) -> bool:
        return here != there and (min(here, there), max(here, there)) in self._cut

    def hosts_down(self, host: str) -> bool:
        """Its power is off: nobody there answers, not even a kernel."""
        return host in self._down

    def power(self, host: str, on: bool) -> None:
        """Off, it says nothing any more; keepalive finds out, or the host itself does when it is back."""
        if not on:
            self._down.add(host)
            self.sched.at(KEEPALIVE_S, self._forgotten, [stream for stream in self.streams if host in stream.hosts])
        elif host in self._down:
            self._down.discard(host)
            self._forgotten([stream for stream in self.streams if host in stream.hosts])
        self.sched.journal.log("power", host, "on" if on else "off")

    def _forgotten(self, streams: list[Stream]) -> None:
        for stream in streams:
            if stream in self.streams:
                stream.break_off()

    def cut(self, here: str, there: str) -> None:
        self._cut.add((min(here, there), max(here, there)))
        self.sched.journal.log("cut", f"{here}-{there}")

    def heal(self, here: str, there: str) -> None:
        path = (min(here, there), max(here, there))
        if path in self._cut:
            self._cut.discard(path)
            self.sched.journal.log("heal", f"{here}-{there}")
            for stream in list(self.streams):
                stream.healed()

    def heal_all(self) -> None:
        for here, there in sorted(self._cut):
            self.heal(here, there)

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def number(self) -> int:
        self._numbers += 1
        return self._numbers


class Listener(Pollable):
    """A listening socket's queue; `address` is ("unix", path) or (host, port)."""

    def __init__(self, address: Any, process: Process) -> None:
        super().__init__()
        self.address, self.process = address, process
        self.queue: deque[Socket] = deque()

    def readable(self) -> bool:
        return bool(self.queue)


class Stream:
    """One connection. `ends[0]` dialled."""

    def __init__(self, net: Network, ends: tuple[Socket, Socket]) -> None:
        self.net, self.ends = net, ends
        self.number = net.number()
        self.hosts = (ends[0].process.host, ends[1].process.host)
        self._held: list[tuple[int, bytes | None]] = []  # sent into a cut: (to which end, bytes or the end)
        self._last_s = [0.0, 0.0]
        self._cut_since_s: float | None = None
        self.broken = self.half_open = False
        net.streams.append(self)

    def send(self, to: int, data: bytes | None) -> None:
        """`None` is the end of the stream."""
        sched = self.net.sched
        if self.net.hosts_down(self.hosts[0]) or self.net.hosts_down(self.hosts[1]):
            return
        if self.net.is_cut(*self.hosts):
            if self._cut_since_s is None:
                self._cut_since_s = sched.now_s
                sched.at(KEEPALIVE_S, self._given_up)
            self._held.append((to, data))
            return
        at_s = max(self._last_s[to], sched.now_s + self.net.delay_s(*self.hosts))
        self._last_s[to] = at_s
        sched.at(at_s - sched.now_s, self._arrive, to, data)

    def _arrive(self, to: int, data: bytes | None) -> None:
        end = self.ends[to]
        if self.broken:
            return
        if self.net.is_cut(*self.hosts):
            self.send(to, data)
        elif data is None:
            end.ended = True
            end.changed()
        elif end.closed or end.failed:  # nobody there: the sender hears so
            self.net.sched.at(self.net.delay_s(*self.hosts), self.reset, 1 - to)
        else:
            end.take(data)

    def healed(self) -> None:
        if not self.net.is_cut(*self.hosts):
            self._cut_since_s = None
            held, self._held = self._held, []
            for to, data in held:
                self.send(to, data)

    def _given_up(self) -> None:
        """Keepalive got no answer."""
        if self._cut_since_s is not None and self.net.sched.now_s - self._cut_since_s >= KEEPALIVE_S - 1e-6:
            self.net.sched.journal.count("net: keepalive gave up")
            self.break_off()

    def break_off(self, only: int | None = None) -> None:
        """Both ends find it broken, or only one does (half open) until the other sends something, or keepalive does."""
        if only is None:
            self.broken = True
        else:
            self.half_open = True
            self.net.sched.at(KEEPALIVE_S, self.reset, 1 - only)
        self.net.sched.journal.log("break", f"stream {self.number}", "both" if only is None else f"end {only}")
        for at in (0, 1) if only is None else (only,):
            self.reset(at)

    def reset(self, at: int) -> None:
        end = self.ends[at]
        if not end.failed:
            end.failed = True
            end.changed()
        self._forget()

    def close(self, at: int) -> None:
        """One end closed its socket."""
        if not (self.broken or self.half_open):
            self.send(1 - at, None)
        self._forget()

    def _forget(self) -> None:
        if all(end.closed or end.failed for end in self.ends) and self in self.net.streams:
            self.net.streams.remove(self)


class Socket(Pollable):
    """In the place of `socket.socket`, as far as the pool uses one."""

    here: ClassVar[Callable[[], tuple[Network, Process]]]
    """The network, and the process that calls."""

    def __init__(
        self, family: int = real.AF_INET, type: int = real.SOCK_STREAM, *, of: tuple[Network, Process] | None = None
    ) -> None:
        super().__init__()
        self.net, self.process = of or Socket.here()
        self.family, self.type = real.AddressFamily(family), type
        self.closed = self.ended = self.failed = self.shut = False
        self.stream: Stream | None = None
        self.at = 0
        self._number = self.net.number()
        self._inbox = bytearray()
        self._unread = 0  # of the peer: what we sent and it has not read
        self._timeout_s: float | None = None
        self._listener: Listener | None = None
        self._name: Any = None
        self.process.at_exit.append(self._died)

    # Readiness

    def readable(self) -> bool:
        if self._listener is not None:
            return self._listener.readable()
        return bool(self._inbox) or self.ended or self.failed

    def writable(self) -> bool:
        return self.failed or self._unread < BUFFER

    def take(self, data: bytes) -> None:
        self._inbox += data
        self.changed()

    # The library's names

    def fileno(self) -> int:
        return -1 if self.closed else self._number

    def setsockopt(self, *_: Any) -> None:
        pass

    def getsockopt(self, *_: Any) -> int:
        return 0

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, blocking: bool) -> None:
        self._timeout_s = None if blocking else 0.0

    def getsockname(self) -> Any:
        return self._name

    def getpeername(self) -> Any:
        self._must_be_open()
        if self.stream is None:
            raise OSError("not connected")
        return (self.stream.hosts[1 - self.at], 0)

    def bind(self, address: Any) -> None:
        self.net.sched.call()
        if self.family == real.AF_UNIX:
            self._name = ("unix", str(address))
            Path(str(address)).touch()  # whoever looks for the socket finds its name
        else:
            self._name = (self.process.host, address[1] or self.net.port())

    def listen(self, backlog: int = 128) -> None:
        self._listener = self.net.listeners[self._name] = Listener(self._name, self.process)
        self._listener.watchers = self.watchers

    def accept(self) -> tuple[Socket, Any]:
        self.net.sched.call()
        assert self._listener is not None
        if not self._listener.queue:
            raise BlockingIOError
        sock = self._listener.queue.popleft()
        return sock, ("", 0)

    def connect(self, address: Any) -> None:
        sched = self.net.sched
        sched.call()
        self._must_be_open()
        name = ("unix", str(address)) if self.family == real.AF_UNIX else (address[0], address[1])
        until_s = sched.now_s + (HANDSHAKE_S if self._timeout_s is None else self._timeout_s)
        there = self.process.host if self.family == real.AF_UNIX else str(name[0])
        while self.net.is_cut(self.process.host, there) or self.net.hosts_down(there):
            if sched.now_s >= until_s:
                raise TimeoutError("timed out")
            sched.park(min(1.0, until_s - sched.now_s) + 1e-6)
        away_s = 2 * self.net.delay_s(self.process.host, there)
        sched.sleep(min(away_s, max(0.0, until_s - sched.now_s)))
        if away_s > 0 and sched.now_s >= until_s:
            raise TimeoutError("timed out")
        listener = self.net.listeners.get(name)
        if listener is None or listener.process.dead:
            raise ConnectionRefusedError(111, "Connection refused")
        other = Socket(self.family, self.type, of=(self.net, listener.process))
        stream = Stream(self.net, (self, other))
        self.stream, self.at = stream, 0
        other.stream, other.at = stream, 1
        listener.queue.append(other)
        listener.changed()

    def send(self, data: Any) -> int:
        self.net.sched.call()
        self._must_be_open()
        if self.failed or self.shut:
            raise ConnectionResetError(104, "Connection reset by peer")
        raw = bytes(data)
        room = BUFFER - self._unread
        if room <= 0:
            raise BlockingIOError
        raw = raw[:room]
        assert self.stream is not None
        self._unread += len(raw)
        rng = self.net.sched.rng
        if len(raw) > 1 and rng.random() < 0.05:  # in two pieces
            at = rng.randrange(1, len(raw))
            self.stream.send(1 - self.at, raw[:at])
            self.stream.send(1 - self.at, raw[at:])
        else:
            self.stream.send(1 - self.at, raw)
        return len(raw)

    def sendall(self, data: Any) -> None:
        view = memoryview(bytes(data))
        while view:
            try:
                view = view[self.send(view) :]
            except BlockingIOError:
                self._wait(self.writable)

    def sendmsg(self, buffers: Any) -> int:
        return self.send(b"".join(bytes(piece) for piece in buffers))

    def recv(self, size: int) -> bytes:
        self.net.sched.call()
        self._must_be_open()
        if not self.readable():
            self._wait(self.readable)
        if self._inbox:
            data = bytes(self._inbox[:size])
            del self._inbox[:size]
            if self.stream is not None:
                other = self.stream.ends[1 - self.at]
                full = other._unread >= BUFFER
                other._unread -= len(data)
                if full:
                    other.changed()
            return data
        if self.failed:
            raise ConnectionResetError(104, "Connection reset by peer")
        return b""

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        data = self.recv(size or len(buffer))
        memoryview(buffer).cast("B")[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        self._must_be_open()
        if self.failed or self.stream is None:
            raise OSError(107, "Transport endpoint is not connected")
        if how in (real.SHUT_WR, real.SHUT_RDWR) and not self.shut:
            self.shut = True
            self.stream.send(1 - self.at, None)
        if how in (real.SHUT_RD, real.SHUT_RDWR):
            self.ended = True
        self.changed()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.changed()
        if self._died in self.process.at_exit:
            self.process.at_exit.remove(self._died)
        if self._listener is not None:
            self.net.listeners.pop(self._name, None)
        elif self.stream is not None:
            self.stream.close(self.at)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How

    def _must_be_open(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until ready, or the socket's own time limit."""
        sched = self.net.sched
        if self._timeout_s == 0.0:
            raise BlockingIOError
        task = sched.call()
        until_s = None if self._timeout_s is None else sched.now_s + self._timeout_s
        self.watchers.append(task)
        try:
            while not ready() and not self.closed:
                left_s = None if until_s is None else until_s - sched.now_s
                if left_s is not None and left_s <= 0:
                    raise TimeoutError("timed out")
                sched.park(left_s)
        finally:
            self.watchers.remove(task)
        self._must_be_open()

    def _died(self) -> None:
        """Its process was killed: the kernel closes it, if there is one left."""
        if self.closed:
            return
        self.closed = True
        if self._listener is not None:
            self.net.listeners.pop(self._name, None)
            for waiting in self._listener.queue:
                waiting.close()
        elif self.stream is not None:
            if self.net.hosts_down(self.process.host):
                return  # nobody says anything
            if self._inbox:
                self.net.sched.at(self.net.delay_s(*self.stream.hosts), self.stream.reset, 1 - self.at)
                self.stream._forget()
            else:
                self.stream.close(self.at)
