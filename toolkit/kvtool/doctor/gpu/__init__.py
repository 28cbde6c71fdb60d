"""`kvtool gpu-check`: what can be proven on a GPU host only, proven there, step by step, as a report to send back.

Steps run in processes of their own under a deadline (runner.py); what they are stands in steps.py, and how they do it
in `plugins/kvtool_trtllm/gpucheck`. A step that was skipped or failed has shown nothing, and the report says so.
"""
