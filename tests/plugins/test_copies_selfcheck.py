"""The check that an operator runs on a GPU host: it passes what is right and finds what is wrong."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import EngineFailed  # noqa: E402
from kvtool_trtllm import selfcheck  # noqa: E402
from kvtool_trtllm.copies import Mover, Table  # noqa: E402
from kvtool_trtllm.kernel import Kernel  # noqa: E402
from kvtool_trtllm.twin import Twin  # noqa: E402


class Wrong(Twin):
    """Leaves the last byte of the last block as it was, and adds one to sums."""

    def copy(self, gathering: bool, table: Table, rows: torch.Tensor, packed: torch.Tensor) -> None:
        kept = packed[-1, -1].clone(), [piece.memory[:, -1].clone() for piece in table]
        super().copy(gathering, table, rows, packed)
        packed[-1, table.runs[-1][1] - 1] = kept[0]
        for piece, last in zip(table, kept[1], strict=True):
            piece.memory[:, -1] = last

    def checksum(self, blocks: torch.Tensor, seed: int) -> torch.Tensor:
        return super().checksum(blocks, seed) + 1


class Failing(Twin):
    def copy(self, gathering: bool, table: Table, rows: torch.Tensor, packed: torch.Tensor) -> None:
        raise EngineFailed("device copies, gather: unspecified launch failure")


def test_what_is_right_passes(mover: Mover, device: torch.device) -> None:
    results = list(selfcheck.check(device, mover, cases=4))
    assert [str(result) for result in results if result.failed] == []
    assert len(results) == (6 if device.type == "cuda" else 4)
    assert str(results[0]) == "ok: gather, packed on the device, 4 cases"


def test_what_is_wrong_is_found() -> None:
    found = {result.what: result.failed for result in selfcheck.check(torch.device("cpu"), Wrong(), cases=4)}
    assert found.pop("lossy packing") is None
    assert all(failed and "the bytes differ" in failed for failed in found.values()) and len(found) == 3


def test_what_raises_is_told() -> None:
    first = next(iter(selfcheck.check(torch.device("cpu"), Failing())))
    assert str(first).startswith("FAILED in case 0, device copies, gather: unspecified launch failure: gather")


def test_without_a_gpu_it_is_skipped_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert selfcheck.main() == 3
    assert capsys.readouterr().out == "skipped: no GPU; device copies were not checked\n"


def test_it_checks_kernels_and_torch_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_cpu: Kernel
) -> None:
    """The same with this CPU in the GPU's place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "CPU")
    for movers, code in (([on_cpu], 0), ([Wrong()], 1), ([Twin()], 3)):
        monkeypatch.setattr(selfcheck, "mover_for", lambda device, movers=movers: movers[0])
        monkeypatch.setattr(selfcheck, "check", lambda device, mover: _on_cpu(mover))
        assert selfcheck.main() == code
        said = capsys.readouterr().out
        assert ("skipped: the kernels" in said) == (code != 0)
        assert said.count("ok: ") == {0: 2, 1: 0, 3: 1}[code] and ("FAILED" in said) == (code == 1)


def _on_cpu(mover: Mover) -> list[selfcheck.Result]:
    return [selfcheck._all("gather", 2, lambda seed: selfcheck._copy(seed, torch.device("cpu"), mover, True, False))]
