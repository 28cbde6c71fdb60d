"""What can go wrong, as one tree.

    KvtoolError                 a sentence for a person: what was wanted, what was found, what to do
    ├── Refused                 the input is wrong; nothing was started, nothing was lost (exit 2)
    │   ├── SpecRefused         a deployment spec or setting
    │   ├── CheckpointRefused   a checkpoint that cannot become an engine
    │   ├── EngineRefused       an engine directory that cannot be served
    │   └── RequestRefused      one generation request
    ├── Missing                 a component is not installed; the sentence has the line that installs it
    ├── BuildFailed             a program that builds an engine failed, or made another; nothing of it was kept
    ├── Unavailable             a peer, server or pool did not answer; trying later may help
    │   ├── PoolUnavailable     no rank of the pool answers
    │   ├── PoolFull            no room, and nothing evictable; the reason is in the sentence
    │   ├── EngineFull          no free KV blocks in the engine for another sequence
    │   ├── Unreachable         a client found no deployment that answers; what it asked for is not to blame
    │   └── Overloaded          refused early; `retry_after_s` says when to come back
    ├── LeaseLapsed             a read outlived its lease; the copy must be thrown away
    ├── BlockCorrupt            bytes did not match their checksum; counted, quarantined, a miss
    ├── EngineFailed            the engine raised, or gave logits that are no numbers; that request is lost, no other
    ├── DeadlinePassed          the request's own time was up
    ├── Cancelled               the client went away or asked to stop
    └── ProtocolError           a peer speaks another version, or nonsense

The command line prints the sentence without a traceback and exits with `exit_code`.
"""

from __future__ import annotations


class KvtoolError(Exception):
    """Base of every error that kvtool raises on purpose."""

    exit_code = 1


class Refused(KvtoolError):
    exit_code = 2


class SpecRefused(Refused):
    pass


class CheckpointRefused(Refused):
    pass


class EngineRefused(Refused):
    pass


class RequestRefused(Refused):
    pass


class Missing(KvtoolError):
    pass


class BuildFailed(KvtoolError):
    pass


class Unavailable(KvtoolError):
    pass


class PoolUnavailable(Unavailable):
    pass


class PoolFull(Unavailable):
    pass


class EngineFull(Unavailable):
    pass


class Unreachable(Unavailable):
    pass


class Overloaded(Unavailable):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseLapsed(KvtoolError):
    pass


class BlockCorrupt(KvtoolError):
    pass


class EngineFailed(KvtoolError):
    pass


class DeadlinePassed(KvtoolError):
    pass


class Cancelled(KvtoolError):
    pass


class ProtocolError(KvtoolError):
    pass
