"""Buffers of a caller, for blocks to be copied into or stored from.

Anything with the buffer protocol (bytearray, mmap, numpy arrays), torch tensors on the CPU by their pointer, and torch
tensors on a GPU by a copy through host memory. torch is not imported: who has a tensor has imported it.

The GPU path is as plain as it looks, and was written and tested without a GPU at hand: only its host half has been run.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from kvtool.transfer.checksum import as_bytes, copy_checksum
from kvtool.transfer.peer import address_of


class Room(Protocol):
    """Where one block may be copied to."""

    size: int

    def fill(self, source: memoryview, key: bytes) -> int:
        """Copy `source` to the beginning; the checksum of what was copied, under `key`."""
        ...


class HostRoom:
    """Memory of this process. Keeps `owner`, whose memory it is, alive."""

    __slots__ = ("_owner", "size", "view")

    def __init__(self, view: memoryview, owner: object = None) -> None:
        self.view, self.size, self._owner = view, len(view), owner

    @property
    def address(self) -> int:
        return address_of(self.view)

    def fill(self, source: memoryview, key: bytes) -> int:
        return copy_checksum(self.view[: len(source)], source, key)


class DeviceRoom:
    """A contiguous tensor on a GPU. Blocks go through a copy in host memory, which is what the checksum is of."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.size = int(tensor.numel() * tensor.element_size())

    def fill(self, source: memoryview, key: bytes) -> int:
        torch = sys.modules["torch"]
        host = bytearray(len(source))
        sum_ = copy_checksum(host, source, key)
        flat = self._tensor.view(-1).view(torch.uint8)
        flat[: len(source)].copy_(torch.frombuffer(host, dtype=torch.uint8))
        return sum_


def rooms_of(buffers: Sequence[Any]) -> list[Room]:
    """
    Raises:
        ValueError: a buffer that is read-only or not contiguous.
        TypeError: not a buffer.
    """
    rooms: list[Room] = []
    for at, buffer in enumerate(buffers):
        if _is_tensor(buffer):
            _contiguous(buffer)
            rooms.append(DeviceRoom(buffer) if buffer.device.type != "cpu" else HostRoom(_memory(buffer), buffer))
            continue
        view = as_bytes(buffer)
        if view.readonly:
            raise ValueError(f"buffer {at}: wanted one that can be written to, found a read-only one")
        rooms.append(HostRoom(view))
    return rooms


def host_room(buffer: Any) -> HostRoom:
    """
    Raises:
        ValueError, TypeError: as `rooms_of`; or it is on a GPU.
    """
    (room,) = rooms_of([buffer])
    if not isinstance(room, HostRoom) or not room.size:
        raise ValueError("only memory of the host can be registered, and at least a byte of it")
    return room


def bytes_of(buffer: Any) -> memoryview:
    """What a caller's buffer holds, flat; in place where that is host memory.

    Raises:
        ValueError, TypeError: as `rooms_of`.
    """
    if not _is_tensor(buffer):
        return as_bytes(buffer)
    _contiguous(buffer)
    return _memory(buffer if buffer.device.type == "cpu" else buffer.detach().to("cpu"))


def _is_tensor(buffer: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(buffer, torch.Tensor)


def _contiguous(tensor: Any) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"wanted a contiguous tensor, got one with strides {tensor.stride()}; call .contiguous()")


def _memory(tensor: Any) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype; it keeps the tensor alive."""
    size = int(tensor.numel() * tensor.element_size())
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array._kvtool_owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
