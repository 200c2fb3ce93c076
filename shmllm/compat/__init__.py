"""Replacements for vLLM's Python API, for programs written for vLLM.

They are opt-in: importing this package changes nothing until an `install()` is called.
"""
