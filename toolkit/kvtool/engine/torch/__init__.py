"""The torch engine: the CPU default, and the reference that other targets are compared with.

torch's OpenMP threads spin between parallel regions, by default for longer than a scheduler's time slice. Where two
engines share the cores, the spinning of one takes the time that the other needs; where an engine is alone, threads that
sleep too early cost a wake-up at every region. On two cores, milliseconds a decode step (median) and prefill tokens/s:

    spin        one engine alone    two engines at once
    2,000       91      342         60      330
    8,000       30      560         85      267
    20,000      31      490 to 610  160     206
    default     34      560         80 to 350, with P90 of 285 to 500

So 8,000 turns, 0.1 to 0.4 ms: about as long as the gaps between the regions of a step. libgomp reads it when it
is loaded, so it is made here, before torch is imported; a value from outside stands.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "8000")
