"""The torch engine: the CPU default, and the reference that other targets are compared with.

torch's OpenMP threads spin between parallel regions, by default for longer than a scheduler's time slice. Where two
engines or anything else shares the cores, the spinning takes the time that the others need: on a busy two-core host a
decode step took 405 ms, and 33 ms with a short spin. libgomp reads the setting when it is loaded, so it is made here,
before torch is imported; a value from outside stands.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
