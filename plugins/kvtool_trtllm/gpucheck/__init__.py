"""The steps of `kvtool gpu-check`, each run in a process of its own: what they do on a GPU host.

They live beside the connector since they drive it, and since nothing in kvtool imports plugins.
"""
