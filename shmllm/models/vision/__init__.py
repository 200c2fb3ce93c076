"""Towers: what makes embeddings of images. `specs.py` says what they are, without torch."""
