"""What would happen: production code under a time that is only counted.

**Traces** (`trace`, `sample`, `replay`): a trace replayed on the production rules, without bytes and without waiting.

**The whole pool** (`run` and all the rest): ranks and clients in one thread, under virtual time, with every fault drawn
from one seed. What runs is the production code, whole: rules, event loop, wire, membership, links, puts and reads. What
is replaced lies below it, the doors through which a process reaches its machine: clock, threads, sockets, shared
memory, one-sided transfers and disk (`system`). So there is no second implementation of anything that could be right
where the first is wrong. After FoundationDB's simulator (Zhou et al., SIGMOD 2021, section 4) and TigerBeetle's VOPR.

A run is a function of its seed: threads are greenlets that switch only where they wait, events are ordered by time and
then by when they were made, and nothing asks for the real time, an address or the order of a set.

To read in order: `sched` (time, processes, threads), `journal`, `sync`, `poll`, `net`, `memory`, `onesided`, `disk`
(the machine), `world`, `system` (its doors); `shape` and `blocks` (what a seed makes), `rank`, `client`, `faults`,
`oracles`, `run`, `seeds`.
"""
