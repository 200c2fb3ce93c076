"""Runs a model on a GPU, with kernels launched eagerly or replayed from captured CUDA graphs."""
