"""Encryption at rest: AES-256-GCM over each block that goes to a disk or a store.

KV blocks tell what was said. With a key, payloads leave this process only encrypted, and a header that was changed, or
put on another block, fails the tag. Each opening of a file takes a random salt, the key for it is derived from the
user's (BLAKE3, keyed), and nonces count up under it: none is ever used twice, whatever crashed in between. Block keys,
parents and sizes stay readable, so that a restart can list them; the checksum of the plain bytes is masked, as it would
tell whether two blocks are alike.

Needs the `cryptography` package: pip install 'kvtool[crypt]'.
"""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvtool.errors import Missing, Refused
from kvtool.transfer.filehead import SEALED, SlotHeader

KEY_BYTES = 32
_MAKE = "head -c 32 /dev/urandom > KEYFILE; chmod 600 KEYFILE"
_KNOWN_MAX = 64
_NO_TAG = bytes(16)


def read_key(path: Path, setting: str = "pool.file_key") -> bytes:
    """The key in `path`: 32 bytes, or 64 hex digits, in a file that only its owner can read.

    Raises:
        Refused: there is none, somebody else may read it, or it is no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise Refused(f"{setting}: wanted a key in {path}, opening gave: {error.strerror}; make one: {_MAKE}") from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Refused(
                f"{setting}: wanted {path} to be a file of user {os.geteuid()} with mode 0600, found "
                f"{stat.filemode(found.st_mode)} of user {found.st_uid}; chmod 600 it, and change it if others read it"
            )
        raw = file.read(1024)
    try:
        key = raw if len(raw) == KEY_BYTES else bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise Refused(
            f"{setting}: wanted 32 bytes or 64 hex digits in {path}, found {len(raw)} bytes; make one: {_MAKE}"
        )
    return key


class FileSealer:
    """The `files.Sealer` of one opening of a file. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        """
        Raises:
            Missing: `cryptography` is not installed.
        """
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise Missing(
                "pool.file_key needs the package cryptography; install it: pip install 'kvtool[crypt]'"
            ) from None
        self._cipher: Any = Cipher
        self._aes, self._gcm = algorithms.AES, modes.GCM
        self._key = blake3(b"kvtool files 1", key=key).digest()
        self.key_check = blake3(b"kvtool file key check", key=key).hexdigest()[:32]
        self._salt = os.urandom(16)
        self._nonces = itertools.count(1)
        self._known: dict[bytes, bytes] = {}

    def seal(self, payload: memoryview, out: memoryview, header: SlotHeader) -> SlotHeader:
        """Encrypt `payload` into `out`, of the same size; the header that goes with it."""
        key, nonce = self._derived(self._salt), next(self._nonces)
        header = header._replace(
            flags=header.flags | SEALED, sealed_with=self._salt, nonce=nonce, tag=_NO_TAG, stored=0
        )
        header = header._replace(checksum=header.checksum ^ _mask(key, nonce))
        encryptor = self._cipher(self._aes(key), self._gcm(_nonce(nonce))).encryptor()
        encryptor.authenticate_additional_data(header.pack())
        encryptor.update_into(payload, out)
        encryptor.finalize()
        return header._replace(tag=encryptor.tag)

    def reveal(self, header: SlotHeader) -> SlotHeader:
        """The header with the checksum of the plain bytes in it."""
        if not header.flags & SEALED:
            return header
        return header._replace(checksum=header.checksum ^ _mask(self._derived(header.sealed_with), header.nonce))

    def unseal(self, stored: memoryview, out: memoryview, header: SlotHeader) -> bool:
        """Decrypt `stored` into `out`; False when it is not what was sealed with that header, as it is on the disk."""
        from cryptography.exceptions import InvalidTag

        key = self._derived(header.sealed_with)
        decryptor = self._cipher(self._aes(key), self._gcm(_nonce(header.nonce), header.tag)).decryptor()
        decryptor.authenticate_additional_data(header._replace(tag=_NO_TAG, stored=0).pack())
        decryptor.update_into(stored, out)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True

    def _derived(self, salt: bytes) -> bytes:
        key = self._known.get(salt)
        if key is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            key = self._known[salt] = blake3(salt, key=self._key).digest()
        return key


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _mask(key: bytes, number: int) -> int:
    return int.from_bytes(blake3(b"sum" + _nonce(number), key=key).digest(8), "little")
