"""Names of the files in a pool's run directory; `pool.rundir` says what is in them."""

STATE = "pool.json"
LAUNCH, CONFIG, WANTED, LOG, MPI_TMP = "launch.json", "rank.json", "wanted.json", "pool.log", "mpi"
KEEPER, KEEPER_LOCK = "keeper.json", "keeper.lock"
