"""The tokens that a step's processing of logits has left, on their way from the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shmllm.outputs.sampling_masks import SamplingMasks
from shmllm.worker.arrays import FloatArray
from shmllm.worker.gpu.transfers import PendingArrays, Transfers

BYTE_BITS, WORD_BITS = 8, 64


class PendingSamplingMasks:
    """Bits of the kept tokens, which the device copies to the host.

    Args:
        pending: (N, 8 * ceil(V / 64)) uint8, bit t % 8 of byte t // 8 stands for token t.
        temperature: (N,), 0 for rows whose bits have no meaning.
    """

    def __init__(self, pending: PendingArrays, temperature: FloatArray) -> None:
        self._pending = pending
        self._temperature = temperature

    def result(self) -> SamplingMasks:
        """Wait for the copy. May be called once."""
        (packed,) = self._pending.arrays()
        words = packed.view(np.uint64).reshape(len(self._temperature), -1)
        drawn = np.flatnonzero(self._temperature)
        rows, columns = np.nonzero(words[drawn])
        some = words[drawn[rows], columns, None]  # most are 0
        bits = np.unpackbits(some.view(np.uint8), axis=1, bitorder="little")
        entries, places = np.nonzero(bits)
        token_ids = WORD_BITS * columns[entries] + places
        return SamplingMasks.of_entries(len(words), drawn[rows[entries]], token_ids)


def fetch_sampling_masks(
    processed: Tensor, temperature: FloatArray, transfers: Transfers
) -> PendingSamplingMasks:
    """Start to copy to the host which tokens the processing of logits has left.

    Args:
        processed: (N, V) float32 on the device, -inf for tokens that are not left.
        temperature: (N,), the temperatures of the rows.
        transfers: copies them.
    """
    kept = processed > float("-inf")
    padding = -kept.shape[1] % WORD_BITS
    bits = pad(kept.view(torch.uint8), (0, padding)).view(len(kept), -1, BYTE_BITS)
    places = torch.arange(BYTE_BITS, dtype=torch.uint8, device=kept.device)
    packed = (bits << places).sum(dim=2, dtype=torch.uint8)
    return PendingSamplingMasks(transfers.fetch(packed), temperature)
