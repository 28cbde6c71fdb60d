"""The torch engine: the CPU default, and the reference that other targets are compared with."""
