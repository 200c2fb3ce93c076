"""Towers for sound. `specs.py` says what they are, without torch."""
