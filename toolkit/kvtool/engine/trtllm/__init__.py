"""TensorRT-LLM: which versions there are, what each takes, and what is built for them.

Nothing here imports tensorrt_llm but what runs inside a worker: importing it starts MPI, loads CUDA, and fails or hangs
without them. What a version takes is looked up in `api.json`, the recorded signatures of the releases.
"""
