"""What the pool decides. Pure rules: no I/O, no clock, no threads; the time is an argument, moves are returned.

To read in order: `layout` and `block` (what a block is, and its key), `lease`, `slots`, `evict` and `placement` (one
rule each), `record` (what is known of a block), `room` (two tiers, and how room is made), `store` (one rank: puts,
reads, time); `view`, `steps` and `membership` (which ranks there are, and what one of them does about it).
"""
