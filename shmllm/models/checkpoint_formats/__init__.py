"""Checkpoints in safetensors files whose matrices are quantized; a module for each method.

The list of methods: `shmllm.models.quantization_methods`.
"""
