"""Families of models: each file reads the config.json of one, and names its weights.

`architectures.py` beside this package says which architecture is which family. A family may import
another that it resembles; nothing else imports one but by that table.
"""
