"""Traces: each process records events while it runs, and a timeline combines all recordings.

This package owns the recordings (one file of fixed-size records for each process), their
directory, and the timeline. It imports no other package of shmllm. The enums in `layout` give the
records their meaning; the code that records lies in `engine.tracing` and `frontend.tracing`.
"""
