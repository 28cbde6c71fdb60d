"""The tests of the contract run every line of the connector that runs without a GPU."""

from __future__ import annotations

import coverage_gate
import pytest


@pytest.mark.slow
def test_every_line_of_the_connector_is_run(tmp_path):
    report = coverage_gate.measure(tmp_path, "tests/contract", "tests/plugins")
    print(report)
    lacking = [line for line in report.splitlines() if line.startswith("plugins/") and " 100%" not in line]
    assert not lacking, "\n".join(lacking)
