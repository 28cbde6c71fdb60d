"""Read GGUF files: metadata, and where each tensor's bytes lie. Bounds-checked, numpy only.

A checkpoint is a stranger's file. Every count and offset is compared with what the file can hold before anything is
allocated or sliced, so a file cut short or changed ends in a sentence and never in a traceback or an allocation of
terabytes. The file is mapped, not read: tensors are views, and their pages are shared between processes.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. Quantised blocks cover 32 values along the row.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.errors import CheckpointRefused

MAGIC = b"GGUF"
VERSIONS = (2, 3)
GROUP = 32
"""Values per quantised block."""

_SCALARS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", GROUP)])
_Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", GROUP // 2)])
_Q4_1 = np.dtype([("scale", "<f2"), ("offset", "<f2"), ("codes", "u1", GROUP // 2)])
TENSOR_TYPES: dict[int, tuple[str, int, np.dtype[Any]]] = {
    0: ("F32", 1, np.dtype("<f4")),
    1: ("F16", 1, np.dtype("<f2")),
    2: ("Q4_0", GROUP, _Q4_0),
    3: ("Q4_1", GROUP, _Q4_1),
    8: ("Q8_0", GROUP, _Q8_0),
    30: ("BF16", 1, np.dtype("<u2")),
}
"""GGUF type number -> name, values per element, element as stored."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor in the file. `shape` is rows first, as torch has it (GGUF lists the row length first)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class Codes:
    """A 4-bit matrix as the file has it: value = code * scale + offset, per group of 32 along the row.

    codes: uint8 [rows, columns], 0 to 15; scale, offset: float32 [rows, columns / 32].
    """

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    offset: npt.NDArray[np.float32]


class _Cursor:
    """Reads forward through the header and refuses to leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def refuse(self, wanted: str, found: str) -> CheckpointRefused:
        return CheckpointRefused(
            f"{self.path}: at byte {self.at} wanted {wanted}, found {found}; the file is damaged or cut short, "
            "fetch it again"
        )

    def take(self, size: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if size > left:
            raise self.refuse(f"{what} of {size} bytes", f"{left} bytes to the end of the file")
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A count of things that take `smallest` bytes or more each, so the file bounds it."""
        count = int(self.number("<Q", what))
        left = len(self.data) - self.at
        if count * smallest > left:
            raise self.refuse(f"a {what} that fits in {left} bytes", str(count))
        return count

    def text(self, what: str) -> str:
        raw = self.take(self.count(f"length of {what}", 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"{what} in UTF-8", repr(raw[:40])) from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise self.refuse(f"{what} of a known type", f"type {kind}")
        item = int(self.number("<I", f"item type of {what}"))
        if item == _STRING:
            return [self.text(what) for _ in range(self.count(f"item count of {what}", 8))]
        if item not in _SCALARS:
            raise self.refuse(f"{what}: an array of numbers or strings", f"items of type {item}")
        dtype = np.dtype(_SCALARS[item].replace("<?", "?"))
        count = self.count(f"item count of {what}", dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()


class GgufFile:
    """An open GGUF file: `metadata` (plain Python values) and `tensors` by name.

    Raises:
        CheckpointRefused: not a GGUF file, another version, a type that is not read here, or bytes that do not add up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointRefused(f"{path}: wanted a GGUF file, found none that can be read ({error})") from None
        cursor = _Cursor(path, self._data)
        magic = bytes(self._data[:4])
        if magic != MAGIC:
            raise CheckpointRefused(f"{path}: wanted a GGUF file (it begins with {MAGIC!r}), found {magic!r}")
        cursor.at = 4
        version = int(cursor.number("<I", "version"))
        if version not in VERSIONS:
            raise CheckpointRefused(
                f"{path}: wanted GGUF version {' or '.join(map(str, VERSIONS))}, found {version}; convert it again"
            )
        tensor_count = cursor.count("tensor count", 24)
        pair_count = cursor.count("metadata count", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.text("metadata key")
            self.metadata[key] = cursor.value(int(cursor.number("<I", f"type of {key}")), key)
        self.tensors = self._places(cursor, tensor_count)

    def _places(self, cursor: _Cursor, count: int) -> dict[str, TensorPlace]:
        rough: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.text("tensor name")
            dims = int(cursor.number("<I", f"dimensions of {name}"))
            if not 1 <= dims <= 4:
                raise cursor.refuse(f"{name}: 1 to 4 dimensions", str(dims))
            lengths = [int(cursor.number("<Q", f"shape of {name}")) for _ in range(dims)]
            kind, offset = int(cursor.number("<I", f"type of {name}")), int(cursor.number("<Q", f"offset of {name}"))
            rough.append((name, tuple(reversed(lengths)), kind, offset))
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or isinstance(align, bool) or not 1 <= align <= 1 << 20:
            raise CheckpointRefused(f"{self.path}: wanted general.alignment from 1 to 1048576, found {align!r}")
        base = -(-cursor.at // align) * align
        return {name: self._place(name, shape, kind, base + offset) for name, shape, kind, offset in rough}

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorPlace:
        if kind not in TENSOR_TYPES:
            known = ", ".join(label for label, _, _ in TENSOR_TYPES.values())
            raise CheckpointRefused(
                f"{self.path}: tensor {name} has GGUF type {kind}; this kvtool reads {known}. Convert the model to one "
                "of these"
            )
        label, group, dtype = TENSOR_TYPES[kind]
        values = 1
        for length in shape:
            values *= length  # Python integers: absurd shapes cannot wrap around
        if values == 0 or shape[-1] % group:
            raise CheckpointRefused(
                f"{self.path}: tensor {name} ({label}) has shape {list(shape)}; wanted rows of a multiple of {group}"
            )
        size = values // group * dtype.itemsize
        if offset + size > len(self._data):
            raise CheckpointRefused(
                f"{self.path}: tensor {name} wants bytes {offset} to {offset + size}, the file has {len(self._data)}; "
                "it is cut short, fetch it again"
            )
        return TensorPlace(name, shape, label, offset, size)

    def _elements(self, place: TensorPlace) -> npt.NDArray[Any]:
        dtype = next(dtype for label, _, dtype in TENSOR_TYPES.values() if label == place.kind)
        return np.frombuffer(self._data, dtype, place.size // dtype.itemsize, place.offset)

    def codes(self, name: str) -> Codes:
        """The 4-bit codes of a Q4_0 or Q4_1 matrix."""
        place = self.tensors[name]
        assert place.kind in ("Q4_0", "Q4_1") and len(place.shape) == 2
        rows, columns = place.shape
        raw = self._elements(place)
        packed = raw["codes"]
        codes = np.concatenate([packed & 15, packed >> 4], axis=1).reshape(rows, columns)
        scale = raw["scale"].astype(np.float32).reshape(rows, columns // GROUP)
        offset = raw["offset"].astype(np.float32).reshape(scale.shape) if place.kind == "Q4_1" else scale * -8
        return Codes(codes, scale, offset)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """Tensor `name` in float32, dequantised, shape as in `tensors`."""
        place = self.tensors[name]
        return _dequantise(self._elements(place), place.kind).reshape(place.shape)


def _dequantise(raw: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float32]:
    """Elements as stored -> float32, flat."""
    values: npt.NDArray[Any]
    if kind in ("F32", "F16"):
        values = raw
    elif kind == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif kind == "Q8_0":
        values = raw["codes"] * raw["scale"].astype(np.float32)[:, None]
    else:
        packed = raw["codes"]
        codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
        scale = raw["scale"].astype(np.float32)[:, None]
        values = (codes - 8) * scale if kind == "Q4_0" else codes * scale + raw["offset"].astype(np.float32)[:, None]
    return values.astype(np.float32, copy=False)
