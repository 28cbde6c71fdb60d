"""Opening a block file as it is found, for a look at it while no rank has it open."""

from __future__ import annotations

from pathlib import Path

from kvtool.errors import Refused
from kvtool.transfer.disk import FileDisk
from kvtool.transfer.filehead import HEAD_SIZE, PAGE, FileHead, SlotHeader, page_up
from kvtool.transfer.files import BlockFile


class _Sealed:
    """Stands for the key of an encrypted file; its records are checked as they are on the disk, and never opened."""

    def __init__(self, key_check: str) -> None:
        self.key_check = key_check

    def seal(self, payload: memoryview, out: memoryview, header: SlotHeader) -> SlotHeader:
        raise AssertionError("a file that was opened as found is not written")

    def reveal(self, header: SlotHeader) -> SlotHeader:
        return header

    def unseal(self, stored: memoryview, out: memoryview, header: SlotHeader) -> bool:
        return False


def open_as_found(path: Path) -> BlockFile:
    """The file with the shape that its head tells.

    Raises:
        Refused: it is missing, in use, or its head is damaged or no block file's.
    """
    if not path.is_file():
        raise Refused(f"{path}: wanted a block file, found none")
    with path.open("rb") as raw:
        head = FileHead.unpack(raw.read(HEAD_SIZE))
    if head is None:
        raise Refused(f"{path}: wanted a block file with a whole head, found something else or a damaged one")
    slots = path.stat().st_size // (PAGE + page_up(head.slot_size)) - 1
    sealer = _Sealed(head.key_check) if head.key_check else None
    return BlockFile(
        None,
        head.slot_size,
        slots,
        disk=FileDisk(path),
        fingerprint=head.fingerprint,
        layout=head.layout,
        sealer=sealer,
    )
