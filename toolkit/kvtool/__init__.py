"""kvtool: prefill/decode-disaggregated LLM serving on Triton, with a KV-cache pool one can trust."""

__version__ = "0.1.0"
