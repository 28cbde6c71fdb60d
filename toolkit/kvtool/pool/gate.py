"""The gate of a rank: who is let in, as whom, and as what: a client, another rank, or a client's data connection.

Everything that is refused here is refused with a sentence, and before it cost anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from kvtool.errors import ProtocolError
from kvtool.pool.handshake import Door
from kvtool.pool.loop import Connection
from kvtool.pool.tenants import Tenant
from kvtool.pool.wire import Message, Op


class Gate:
    """`welcome` gives what a client must know of this rank, its identity among it."""

    def __init__(self, key: bytes, fingerprint: str, layout: str, welcome: Callable[[], dict[str, Any]]) -> None:
        self._key, self._fingerprint, self._layout, self._welcome = key, fingerprint, layout, welcome
        self.tenants: Mapping[str, Tenant] = {}
        self._inside: dict[int, Connection] = {}
        self._nobody = secrets.token_bytes(32)  # the key of a tenant that does not exist

    def greet(self, connection: Connection) -> None:
        """Say who we are, and the nonce that the peer must prove the key with."""
        me = self._welcome()
        connection.door = Door(me["identity"], me.get("incarnation", 1))
        connection.send(Op.HELLO, 0, connection.door.greeting)

    def gone(self, connection: Connection) -> None:
        self._inside.pop(connection.owner, None)

    def owner_of(self, hello: dict[str, Any]) -> Connection | None:
        """Whose data connection says `hello`; None when it is none.

        Raises:
            ProtocolError: there is no such client.
        """
        if "data" not in hello:
            return None
        owner = self._inside.get(hello["data"]) if isinstance(hello["data"], int) else None
        if owner is None:
            raise ProtocolError("a data connection of a client that is not here; it has to come in first")
        return owner

    def let_in(self, connection: Connection, message: Message, why_not: Callable[[Connection], str]) -> Any:
        """What the peer said of itself, once it is in; None when it was refused with a sentence.

        `why_not`: why the client may not have one more data connection, empty when it may.

        Raises:
            ProtocolError: it does not know the key, or means somebody else.
        """
        if message.op is not Op.HELLO:
            raise ProtocolError(f"the first message must be HELLO, found {message.op.name}")
        door, me = connection.door, self._welcome()
        assert door is not None
        hello = door.read(message.body)
        client = self.owner_of(hello)
        key, tenant = self._key, None
        if client is not None:
            assert client.session is not None
            key = client.session.data
        elif hello.get("tenant"):
            tenant = self.tenants.get(str(hello["tenant"]))
            key = self._nobody if tenant is None else tenant.key
        if not door.proves(key):
            raise ProtocolError(
                "the peer does not know the pool's key, or its tenant's; use the state file of the running pool"
            )
        if hello.get("to", me["identity"]) != me["identity"]:
            raise ProtocolError(f"the peer means to talk to {str(hello['to'])[:200]}, this is {me['identity']}")
        incarnation = me.get("incarnation", 1)
        if hello.get("incarnation", incarnation) != incarnation:
            raise ProtocolError(
                f"the peer means to talk to incarnation {str(hello['incarnation'])[:20]} of {me['identity']}, "
                f"this is {incarnation}; read the state file again"
            )
        sentence = self._mismatch(hello) if client is None else why_not(client)
        if sentence:
            connection.refuse(message.request, Op.HELLO, sentence)
            return None
        answer, session = door.answer(key, {**me, "you": connection.owner})
        connection.send(Op.HELLO, message.request, answer)
        connection.door, connection.tenant = None, tenant
        connection.admit(session)
        if client is None:
            self._inside[connection.owner] = connection
        return hello

    def _mismatch(self, hello: dict[str, Any]) -> str:
        if hello.get("fingerprint", self._fingerprint) == self._fingerprint:
            return ""
        return (
            f"KV layouts differ: this pool holds {self._layout} (fingerprint {self._fingerprint}), "
            f"{hello.get('name')} has {hello.get('layout')} (fingerprint {hello.get('fingerprint')}); "
            "start the pool with the layout of the engine"
        )
