"""Models whose modules are transformers' own, for `model_impl="transformers"`.

Only an engine with that option imports this package: it imports transformers, which takes seconds.
"""
