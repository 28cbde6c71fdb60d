"""The pool: the rules of `kv` on real memory, files, sockets and clocks; and its clients.

To read in order: `base` (what a pool is to its callers), `memory` and `tiers` (slots and moves), `embedded` (all of it
in one process); a rank: `wire`, `loop`, `service`, `dial`, `membership`, `rank`; a client: `link`, `access`, `ranks`,
`putting`, `reading`, `client`, `outside`; and `config`, `state`, `rundir`, `launch` (starting and stopping).
"""
