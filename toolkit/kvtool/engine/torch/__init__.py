"""The torch engine: the CPU default, and the reference that other targets are compared with.

torch's OpenMP threads spin between parallel regions, by default for longer than a scheduler's time slice. Where two
engines, or anything else, share the cores, the spinning takes the time that the others need: on a two-core host at a
load of 8, the products of one decode step took 267 to 389 ms (median), and 54 to 83 ms with a spin of 1,000. 2,000
turns are 30 to 100 us, longer than the gaps between the regions of a step. libgomp reads the setting when it is loaded,
so it is made here, before torch is imported; a value from outside stands.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
