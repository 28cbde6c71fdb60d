"""kvtool's KV-offload plugin for TensorRT-LLM: the KV cache connector pair, and the device copies beneath it.

TensorRT-LLM loads `kvtool_trtllm.connector` by name (`kv_connector_config`); nothing in `kvtool` imports this package.
"""
