"""`kvtool pool status` shows what each tenant has, over all ranks."""

from __future__ import annotations

from kvtool.cli.pool_tenants import COLUMNS, tenant_rows
from kvtool.kv.quota import Quota, Quotas


def test_usage_is_summed_over_ranks_and_shown_beside_the_quota():
    quotas = Quotas(lambda key: None, lambda key: None)
    quotas.set({"a": Quota(4, 8, 10), "b": Quota()})
    account = quotas.accounts["a"]
    account.dram, account.files, account.aside, account.hits, account.evicted, account.refused = 2, 3, 1, 7, 5, 1
    answer = {"slot_size": 2**20, "tenants": quotas.usage()}
    rows = tenant_rows([answer, answer])
    assert rows == [
        ["a", "6.0 MiB of 8.0 MiB", "6.0 MiB of 16.0 MiB", "0 of 20", "14", "10", "2"],
        ["b", "0 B of any", "0 B of any", "0 of any", "0", "0", "0"],
    ]
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert tenant_rows([{"slot_size": 1}, {"slot_size": 1, "tenants": {}}]) == []
