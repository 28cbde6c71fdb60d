"""Who may talk to a rank, and how a client knows that it talks to one."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from blocks import LAYOUT
from lone import KEY, lone_rank
from watching import until

from kvtool.errors import ProtocolError, Refused
from kvtool.pool import handshake, wire
from kvtool.pool import loop as loop_module
from kvtool.pool.handshake import Door, Knock, Seal, shake
from kvtool.pool.link import Link
from kvtool.pool.wire import Op, Status

OTHER = b"o" * 32


@pytest.fixture
def lone(tmp_path):
    with lone_rank(tmp_path) as lone:
        yield lone


def met(key: bytes = KEY, **said):
    door, knock = Door("pool/0", 3), Knock(key, said, "pool/0", 3)
    door.read(knock.hello(door.greeting))
    return door, knock


def test_both_sides_share_keys_that_no_other_connection_has():
    sessions = []
    for _ in range(2):
        door, knock = met(name="a")
        assert door.proves(KEY)
        answer, theirs = door.answer(KEY, {"rank": 0})
        welcome, ours = knock.welcomed(answer)
        assert welcome == {"rank": 0} and ours == theirs
        sessions += [ours.up, ours.down, ours.data]
    assert len(set(sessions)) == 6


def test_who_does_not_know_the_key_proves_nothing_to_either_side():
    door, knock = met(OTHER)
    assert not door.proves(KEY)
    answer, _ = door.answer(KEY, {})
    with pytest.raises(ProtocolError, match="does not know the pool's key"):
        knock.welcomed(answer)


def test_every_byte_that_was_said_is_bound_and_no_proof_serves_twice():
    door, knock = met(tenant="a")
    greeting, hello = door.greeting, knock.hello(door.greeting)
    for at in range(len(hello)):
        changed = bytearray(hello)
        changed[at] ^= 1
        try:
            door.read(bytes(changed))
        except ProtocolError:
            continue
        assert not door.proves(KEY), f"byte {at} of HELLO is not bound"
    door.read(hello)
    assert door.proves(KEY)
    again = Door("pool/0", 3)
    again.read(hello)
    assert not again.proves(KEY), "a proof was replayed to another nonce"
    answer, _ = door.answer(KEY, {"rank": 0})
    for at in range(len(answer)):
        changed = bytearray(answer)
        changed[at] ^= 1
        with pytest.raises(ProtocolError):
            knock.welcomed(bytes(changed))
    assert greeting == door.greeting


def test_a_proof_sent_back_to_its_maker_is_none():
    """Reflection: the server answers with the client's own proof, under the same transcript."""
    door, knock = met()
    hello = knock.hello(door.greeting)
    with pytest.raises(ProtocolError, match="does not know the pool's key"):
        knock.welcomed(hello[: handshake.PROOF_SIZE] + wire.pack_map({"rank": 0}))


@pytest.mark.parametrize(("identity", "incarnation"), [("pool/1", 3), ("other/0", 3), ("pool/0", 2), ("pool/0", 4)])
def test_a_client_wants_the_very_rank_that_it_means(identity, incarnation):
    with pytest.raises(ProtocolError, match="wanted to reach pool/0"):
        Knock(KEY, {}, "pool/0", 3).hello(Door(identity, incarnation).greeting)


def test_a_rank_refuses_who_means_another(lone):
    with lone.connect() as sock, pytest.raises(Refused, match="means to talk to lone/1, this is lone/0"):
        shake(sock, Knock(KEY, {"to": "lone/1"}), time.monotonic() + 5)


def test_frames_are_taken_in_their_order_once_and_unchanged():
    seal, sent = Seal(KEY), []
    for number in range(3):
        sent.append(wire.frame(Op.PING, number, 7, b"body", seal=seal))

    def takes(*frames: bytes) -> int:
        splitter = wire.Splitter()
        splitter.seal = Seal(KEY)
        return len(splitter.feed(b"".join(frames)))

    assert takes(*sent) == 3
    changed = bytearray(sent[0])
    changed[wire.HEAD.size] ^= 1
    head = bytearray(sent[0])
    head[8] ^= 1  # the request's number
    bare = wire.frame(Op.PING, 0, 7, b"")
    for wrong in ([sent[1]], [sent[0], sent[2]], [sent[0], sent[0]], [bytes(changed)], [bytes(head)], [bare]):
        with pytest.raises(ProtocolError, match=r"changed on its way|without its seal"):
            takes(*wrong)


def test_a_frame_that_never_left_does_not_count():
    mine, theirs = Seal(KEY), Seal(KEY)
    mine.mac(b"lost")
    mine.unsent()
    theirs.check(b"next", mine.mac(b"next"))


@pytest.mark.parametrize("tcp", [False, True])
def test_a_client_is_let_in_over_both_and_a_stranger_over_neither(lone, tcp):
    host = lone.state.host
    if tcp:
        lone.state.host = "elsewhere"
    link = Link(lone.state, KEY, LAYOUT, "friend", False, lambda epoch: None)
    assert wire.unpack_map(link.call(Op.STATUS, b"", time.monotonic() + 5))["rank"] == 0
    for _ in range(3):
        link.call(Op.PING, b"", time.monotonic() + 5)
    link.close()
    stranger = Link(lone.state, OTHER, LAYOUT, "stranger", False, lambda epoch: None)
    with pytest.raises(Refused, match="does not know the pool's key"):
        stranger.call(Op.STATUS, b"", time.monotonic() + 5)
    lone.state.host = host


def test_frames_put_into_a_tcp_connection_by_somebody_else_end_it(lone):
    sock, session = lone.enter(tcp=True)
    with sock:
        sock.sendall(wire.frame(Op.PING, 1, 0, seal=Seal(session.up)))
        assert sock.recv(4096)
        sock.sendall(wire.frame(Op.PING, 2, 0))  # as from one who guessed the sequence numbers, without the session
        closed_with = b""
        while data := sock.recv(4096):
            closed_with += data
        assert b"without its seal" in closed_with


def test_what_is_sent_along_with_hello_is_not_listened_to(lone):
    """Else somebody on the way could add frames of his own before the first sealed one."""
    with lone.connect(tcp=True) as sock:
        head = sock.recv(4096)
        (greeting,) = wire.Splitter().feed(head)
        hello = wire.frame(Op.HELLO, 1, 0, lone.knock().hello(greeting.body))
        sock.sendall(hello + wire.frame(Op.STATUS, 2, 0))
        (answer,) = wire.Splitter().feed(sock.recv(4096))
        assert answer.status is Status.REFUSED and b"before it was let in" in answer.body
        assert sock.recv(4096) == b""


def test_a_dripped_handshake_ends_when_its_time_is_up_and_not_with_its_last_byte(lone, monkeypatch):
    monkeypatch.setattr(loop_module, "HELLO_MAX_S", 0.4)
    with lone.connect() as sock:
        sock.recv(4096)
        began_s = time.monotonic()
        sock.settimeout(0.02)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for byte in wire.frame(Op.HELLO, 1, 0, bytes(4000)):
                sock.sendall(bytes([byte]))
                try:
                    if sock.recv(1) == b"":
                        raise BrokenPipeError
                except TimeoutError:
                    pass
                assert time.monotonic() - began_s < 3
        assert time.monotonic() - began_s >= 0.3


def test_strangers_cannot_keep_friends_out_or_fill_the_memory(lone):
    strangers = [lone.connect() for _ in range(loop_module.UNADMITTED_MAX + 20)]
    until(lambda: lone.do(lambda: len(lone.loop.connections)) <= loop_module.UNADMITTED_MAX, 5, "the oldest made room")
    friend, _ = lone.enter()
    friend.sendall(wire.frame(Op.PING, 1, 0))
    assert friend.recv(100)
    with strangers[-1] as sock:
        sock.recv(4096)
        sock.sendall(wire.HEAD.pack(wire.FRAME_MAX, Op.HELLO, 0, wire.VERSION, 1, 0))
        (answer,) = wire.Splitter().feed(sock.recv(4096))
        assert b"the limit is 8192" in answer.body
    for sock in (*strangers, friend):
        sock.close()
    until(lambda: lone.do(lambda: len(lone.loop.connections)) == 0, 5, "all are gone")


def test_a_server_that_is_no_rank_is_noticed(tmp_path, lone):
    """It accepts everybody: only the key is missing."""
    door = Door("lone/0")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "fake.sock"))
        listener.listen()
        lone.state.unix = str(tmp_path / "fake.sock")
        link = Link(lone.state, KEY, LAYOUT, "victim", False, lambda epoch: None)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(wire.frame(Op.HELLO, 0, 7, door.greeting))
                (hello,) = wire.Splitter().feed(sock.recv(8192))
                door.read(hello.body)
                sock.sendall(wire.frame(Op.HELLO, 1, 7, door.answer(OTHER, {"rank": 0})[0]))
                sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ProtocolError, match="not a rank of this pool"):
            link.call(Op.PING, b"", time.monotonic() + 5)
        thread.join(5)
