"""Matrix products of torch on a CPU whose bits do not depend on the number of threads.

torch divides some products by the number of threads along the sums, which changes their bits. Here
each thread multiplies whole blocks of rows by itself, and the blocks are the same for any number of
threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 128
"""The number of rows in a block."""


class BlockProducts:
    """Computes ``x @ weight.T + bias`` in blocks of rows.

    Args:
        num_threads: the number of threads that compute.
    """

    def __init__(self, num_threads: int) -> None:
        # In a thread of one's own: MKL has one number for the process, and no step uses MKL.
        self._threads = ThreadPoolExecutor(
            num_threads, "shmllm-tower", initializer=partial(torch.set_num_threads, 1)
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [rows, out].

        Args:
            x: [rows, in].
            weight: [out, in].
            bias: [out] or None.
        """
        found = x.new_empty(len(x), len(weight))

        def multiply(begin: int) -> None:
            with torch.inference_mode():
                rows = slice(begin, begin + ROWS)
                found[rows] = F.linear(x[rows], weight, bias)

        list(self._threads.map(multiply, range(0, len(x), ROWS)))
        return found
