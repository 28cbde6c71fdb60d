"""Forty seconds of chaos; `scripts/chaos` makes it half an hour."""

from __future__ import annotations

import json
import os

import pytest
from chaos import wreak

SECONDS = float(os.environ.get("KVTOOL_CHAOS_S", "25"))


@pytest.mark.real
def test_no_wrong_byte_and_nothing_left_whatever_is_killed_stopped_or_spoilt(tmp_path):
    found = wreak(int(os.environ.get("KVTOOL_CHAOS_SEED", "1")), SECONDS, tmp_path / "disk")
    print(json.dumps(found))
    assert found["client_rss_growth_mb"] < 16 and found["client_files_growth"] < 60
    assert max(found["rank_rss_mb"]) < 200 and found["keeper_rss_mb"] < 25
