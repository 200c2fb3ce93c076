"""Writes quantized copies of models, for `shmllm quantize`. No engine takes part."""
