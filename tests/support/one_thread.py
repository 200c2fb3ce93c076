"""Lets the models of transformers compute with one thread.

They are tiny. Two threads would wait for each other behind each operator, and wake each other up:
beside other tests on two cores that takes more processor time than the operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A context, or decorator, in which operators of torch use one thread. An engine in this
    process has the number of threads that it has set before and afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
