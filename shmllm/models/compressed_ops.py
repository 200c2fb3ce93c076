"""The operations of a compressed attention, a part of `ops.Ops`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.compressed_attention import CompressedAttention


class CompressedOps(Protocol):
    """The operations of a compressed attention; see `ops.Ops` and `CompressedAttentionSpec`."""

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> Tensor:
        """Normalises and rotates the keys of the step's tokens, and stores them in the cache.

        Args:
            x: [tokens, columns], of which the last head_dim are a key; these may be overwritten.
            attention: the layer.

        Returns:
            ``x``.
        """

    def compress(self, x: Tensor, attention: CompressedAttention) -> None:
        """Stores what the step's tokens contribute to entries, and makes the entries, and those of
        an indexer, of all windows whose last token is in the step.

        Args:
            x: [tokens, columns], `CompressedAttentionSpec.parts` side by side.
            attention: the layer, which has entries.
        """

    def list_keys(self, x: Tensor, latent: Tensor, attention: CompressedAttention) -> None:
        """Lists what each token of the step attends to: the keys of its window, and all entries of
        windows that end with it or before, or those that the layer's indexer chooses.

        Args:
            x: [tokens, hidden], which the weights of an indexer's heads are a projection of.
            latent: [tokens, query_rank], which its queries are a projection of.
            attention: the layer.
        """

    def attend_to_lists(self, query: Tensor, attention: CompressedAttention) -> Tensor:
        """Computes the attention of the step's tokens to what `list_keys` has listed.

        Each head's query is divided by its root mean square and rotated, its output is rotated
        back, and each group of heads is projected.

        Args:
            query: [tokens, heads * head_dim]; may be overwritten.
            attention: the layer.

        Returns:
            [tokens, groups * group_rank].
        """
