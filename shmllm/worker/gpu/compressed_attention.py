"""A compressed attention on a GPU, which has no kernels for it yet."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from shmllm.models.compressed_attention import CompressedAttention


class NoCompressedAttention:
    """The operations of `models.compressed_ops.CompressedOps`: `features.check_features` refuses a
    model that has them before it is loaded."""

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> NoReturn:
        raise NotImplementedError

    def compress(self, x: Tensor, attention: CompressedAttention) -> NoReturn:
        raise NotImplementedError

    def list_keys(self, x: Tensor, latent: Tensor, attention: CompressedAttention) -> NoReturn:
        raise NotImplementedError

    def attend_to_lists(self, query: Tensor, attention: CompressedAttention) -> NoReturn:
        raise NotImplementedError
