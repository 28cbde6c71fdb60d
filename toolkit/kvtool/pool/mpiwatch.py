"""What MPI tells of deaths. It is asked a few times a second without waiting: a blocking call would spin on a core."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvtool.pool")


class MpiWatch:
    """Failure notices of ULFM, by polling. `communicator`: an `mpi4py.MPI.Comm` with ERRORS_RETURN. Its ranks are those
    of the first incarnations; replacements are unknown to MPI. Without an mpiexec it goes on, and tells nothing new."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self._failed: set[int] = set()
        self._told = False

    def failed(self) -> set[int]:
        """Ranks that MPI knows to have failed; never waits."""
        from mpi4py import MPI

        try:
            self._comm.Iprobe()  # lets MPI make progress on its notices
        except MPI.Exception:
            pass  # a failed peer makes probing for any source an error
        try:
            group = self._comm.Get_failed()
            count = group.Get_size()
            if count > len(self._failed):
                ranks = MPI.Group.Translate_ranks(group, range(count), self._comm.Get_group())
                self._failed.update(int(rank) for rank in ranks)
        except MPI.Exception as error:
            if not self._told:
                self._told = True  # once: this is asked five times a second
                log.warning("mpi cannot tell who failed, sockets still do why=%r", str(error))
        return self._failed
