"""Model architectures: configuration, layers and weights.

This package must not know a scheduler, a KV cache or a process.
"""
