"""The modules of tools/gpu_check: GPU tests and benchmarks. This package is not installed."""
