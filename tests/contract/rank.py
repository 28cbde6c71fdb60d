"""One MPI rank of two engines, one after the other: mpiexec -n TP python rank.py PACKAGE SEED V2 COUNT, with
KVTOOL_CONNECTOR set.

Every rank runs the executor with kvtool's connector; for each engine rank 0 prints what came of it as a line of JSON.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    package, seed, v2, count = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "v2", int(sys.argv[4])
    sys.path.insert(0, package)
    import adversary
    import real

    rank = adversary.fake("ranks").by_mpi()
    setup, requests = real.drawn(seed, v2=v2, count=count)
    for turn in range(2):
        work = adversary.Work(seed + turn, requests, cancels=0.05)
        executor = adversary.fake("executor").Executor(
            setup, work, rank=rank, connector=real.connector(), llm_args=real.llm_args(setup, rank.size)
        )
        executor.run()
        wrong = [line for lines in rank.host.allgather(executor.wrong) for line in lines]
        executor.close()
        rank.host.barrier()
        if rank.rank == 0:
            answers = {one: (done.tokens, done.reason.name) for one, done in executor.done.items()}
            print("said " + json.dumps({"wrong": wrong, "stats": executor.stats, "answers": answers}), flush=True)
