"""With a key, nothing is on the disk in the clear, nothing that was changed is served, and no nonce comes twice."""

from __future__ import annotations

import pytest
from test_files import SLOT, block_of, key_of

from kvtool.errors import BlockCorrupt, Refused
from kvtool.transfer.checksum import checksum
from kvtool.transfer.crypt import FileSealer, read_key
from kvtool.transfer.filehead import PAGE, SlotHeader
from kvtool.transfer.files import BlockFile
from kvtool.transfer.opening import open_as_found

STRIDE = PAGE + 102_400
KEY = bytes(range(32))


def opened(path, key: bytes = KEY, slots: int = 4) -> BlockFile:
    return BlockFile(path, SLOT, slots, sealer=FileSealer(key))


def test_blocks_come_back_also_after_a_reopen_and_nothing_of_them_is_in_the_file(tmp_path):
    path = tmp_path / "blocks"
    sum_ = checksum(block_of(1), key_of(1))
    for again in range(2):
        with opened(path) as file:
            if not again:
                file.write(1, block_of(1), key_of(1), generation=3, parent=key_of(9), durable=True).result(10)
            out = bytearray(SLOT)
            header = file.read(1, out, key_of(1), generation=3).result(10)
            assert out == block_of(1) and (header.checksum, header.parent) == (sum_, key_of(9))
            ((slot, found),) = file.headers()
            assert (slot, found.checksum, found.key) == (1, sum_, key_of(1))
    raw = path.read_bytes()
    assert all(block_of(1)[at : at + 32] not in raw for at in range(0, SLOT, 1000))
    assert sum_.to_bytes(8, "little") not in raw, "the checksum of the plain bytes tells which blocks are alike"


def test_another_key_no_key_and_a_key_for_a_plain_file_are_refused(tmp_path):
    sealed, plain = tmp_path / "sealed", tmp_path / "plain"
    opened(sealed).close()
    BlockFile(plain, SLOT, 4).close()
    with pytest.raises(Refused, match=r"wanted blocks encrypted with the key of pool.file_key, found another's; give"):
        opened(sealed, bytes(32))
    with pytest.raises(Refused, match=r"wanted a block file without encryption, found an encrypted one; set"):
        BlockFile(sealed, SLOT, 4)
    with pytest.raises(Refused, match="wanted an encrypted block file, found one that is not; remove it, or unset"):
        opened(plain)


@pytest.mark.parametrize("what", ["payload", "parent", "tag", "moved"])
def test_what_was_changed_on_the_disk_fails_though_its_checksums_were_made_to_fit(tmp_path, what):
    path = tmp_path / "blocks"
    with opened(path) as file:
        for n in range(2):
            file.write(n, block_of(n), key_of(n)).result(10)
    raw = bytearray(path.read_bytes())
    at = STRIDE
    header = SlotHeader.unpack(bytes(raw[at : at + PAGE]))
    payload = bytearray(raw[at + PAGE : at + PAGE + SLOT])
    if what == "payload":
        payload[7] ^= 1
    elif what == "parent":
        header = header._replace(parent=key_of(77))
    elif what == "tag":
        header = header._replace(tag=bytes(16))
    else:
        payload = raw[2 * STRIDE + PAGE : 2 * STRIDE + PAGE + SLOT]
    header = header._replace(stored=checksum(payload, header.key))
    raw[at : at + len(header.pack())] = header.pack()
    raw[at + PAGE : at + PAGE + SLOT] = payload
    path.write_bytes(raw)
    with opened(path) as file:
        with pytest.raises(BlockCorrupt, match="block 00000000 fails its tag"):
            file.read(0, bytearray(SLOT), key_of(0)).result(10)
        out = bytearray(SLOT)
        file.read(1, out, key_of(1)).result(10)
        assert out == block_of(1)


def test_no_nonce_is_used_twice_and_every_opening_has_its_own_key(tmp_path):
    used = set()
    for _ in range(3):
        with opened(tmp_path / "blocks") as file:
            for _n in range(12):  # the same block, the same slot
                file.write(0, block_of(0), key_of(0)).result(10)
                ((_, header),) = file.headers()
                used.add((header.sealed_with, header.nonce))
    assert len(used) == 36 and len({salt for salt, _ in used}) == 3


def test_an_encrypted_file_is_checked_without_its_key(tmp_path):
    path = tmp_path / "blocks"
    with opened(path) as file:
        file.write(1, block_of(1), key_of(1)).result(10)
    with open_as_found(path) as file:
        file.check(1, key_of(1), SLOT).result(10)
    raw = bytearray(path.read_bytes())
    raw[2 * STRIDE + PAGE + 50] ^= 1
    path.write_bytes(raw)
    with open_as_found(path) as file, pytest.raises(BlockCorrupt, match="torn or damaged"):
        file.check(1, key_of(1), SLOT).result(10)


def test_a_key_is_32_bytes_or_64_hex_digits_that_nobody_else_can_read(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(
        Refused, match=r"pool.file_key: wanted a key in .*, opening gave: No such file .*; make one: head"
    ):
        read_key(path)
    path.write_bytes(KEY)
    path.chmod(0o640)
    with pytest.raises(Refused, match=r"with mode 0600, found -rw-r----- of user \d+; chmod 600 it"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == KEY
    path.write_text(KEY.hex() + "\n")
    assert read_key(path) == KEY
    for wrong in (b"", KEY[:31], b"zz" * 32):
        path.write_bytes(wrong)
        with pytest.raises(Refused, match=f"wanted 32 bytes or 64 hex digits in .*, found {len(wrong)} bytes"):
            read_key(path)
