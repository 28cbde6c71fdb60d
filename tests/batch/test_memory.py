"""Memory does not grow with the job: eight times the requests, the same peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import json, random, resource, sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from made import Bytes, make_job
from kvtool.batch import store
from kvtool.batch.intake import Checks, take_in
from kvtool.batch.job import INDEX, JOURNAL
from kvtool.batch.journal import Journal
from kvtool.batch.results import write_results
from kvtool.batch.store import Entry, Store

what, count, folder = sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
store._CACHE_SIZE = 1 << 20
rng = random.Random(1)

def order():
    """Paths of 4 KiB, laid and sorted."""
    with closing(Store.make(folder / "index")) as made:
        for number in range(count):
            made.add(Entry(number, f"r{number}", number + 1, 0, 1, 0, False, 1, 1, rng.randbytes(4096)))
        assert made.arrange(4, 1000).requests == count
        assert sum(1 for _ in made.by_place()) == count

def intake():
    """Lines of 2 KiB, every second of them bad."""
    with (folder / "in.jsonl").open("w") as file:
        for number in range(2 * count):
            file.write(json.dumps({"custom_id": f"r{number}", "url": "/v1/completions" if number % 2 else "no",
                                   "body": {"prompt": "%02000d" % number}}) + "\\\\n")
    with closing(Store.make(folder / "index")) as made:
        found = take_in(folder / "in.jsonl", folder, made, Bytes(), Checks(8192, 512, 8), lambda done, total: None)
    assert (found.requests, found.rejected) == (count, count)

def results():
    """Answers of 4 KiB."""
    with (folder / "in.jsonl").open("w") as file:
        for number in range(count):
            line = {"custom_id": f"r{number}", "url": "/v1/completions", "body": {"prompt": "x"}}
            file.write(json.dumps(line) + "\\\\n")
    told, job = make_job(folder / "job", folder / "in.jsonl"), folder / "job"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "hit_tokens": {}}
    with closing(Store(job / INDEX)) as made, closing(Journal(job / JOURNAL, count)) as journal:
        for start in range(0, count, 20):
            journal.append([(number, {"custom_id": f"r{number}", "text": rng.randbytes(2048).hex(), "finish": "stop",
                "usage": usage, "attempts": 1, "created_s": 0}) for number in range(start, min(start + 20, count))])
    with closing(Store(job / INDEX)) as made, closing(Journal(job / JOURNAL, count)) as journal:
        assert write_results(told, job, made, journal, folder / "out.jsonl") == (count, 0)

{"order": order, "intake": intake, "results": results}[what]()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
'''.replace("\\\\n", "\\n")


@pytest.mark.real
@pytest.mark.parametrize("what", ["order", "intake", "results"])
def test_the_peak_of_a_large_job_is_that_of_a_small_one(tmp_path: Path, what: str) -> None:
    """What is streamed is 16 MB in the larger one; a quarter of that may be noise."""

    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), what, str(count), str(folder)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)

    small, large = peak(500), peak(4000)
    assert large - small < 4 << 20, f"{small >> 20} MiB for 500 requests, {large >> 20} for 4000"
