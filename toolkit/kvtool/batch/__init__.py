"""Batch offline jobs: a file of requests in, each answer once, in an order that reuses what was computed.

    intake (check every line) -> order (group by prefix) -> run (engine or deployment) -> journal -> results

A job is a directory. What it was told never changes (`job.json`), what came of each request is appended to a journal
and synced before it counts, and everything else can be made again from these two and the input. So a job may be killed
at any moment and resumed: no answer is lost, none is given twice.
"""
