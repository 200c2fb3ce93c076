"""Heads that predict further tokens from the last hidden state of another model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel, Rename
from shmllm.models.draft_specs import MedusaSpec
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.layers import NamedWeights, Norm, Storage

BLOCKS = "transformer.blocks"
"""What the default names of residual blocks begin with: "blocks" in checkpoints."""


class MedusaModel(DraftingModel):
    """See `MedusaSpec`. Its matrices are computed by torch, and not quantized: a step that drafts
    multiplies a row of each request.

    Args:
        config: the configuration, with a `MedusaSpec`.
        storage: allocates the weights.
        renames: those of `DecoderModel`.

    Attributes:
        blocks: of each head the weights, [hidden, hidden], and biases, [hidden] or None, of its
            residual blocks.
        lm_heads: [vocab, hidden] of each head, or one for all.
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        assert isinstance(config.drafting, MedusaSpec), "it is such a model"
        self._spec = spec = config.drafting
        hidden, vocab = config.hidden_size, config.vocab_size

        def block() -> tuple[Tensor, Tensor | None]:
            return (
                storage.tensor(hidden, hidden),
                storage.tensor(hidden) if spec.has_bias else None,
            )

        self.blocks = [[block() for _ in range(spec.num_blocks)] for _ in range(spec.num_heads)]
        count = 1 if spec.shares_head else spec.num_heads
        self.lm_heads = [storage.tensor(vocab, hidden) for _ in range(count)]

    @property
    def own_norms(self) -> dict[str, Norm]:
        return {}

    def borrow(self, lender: DecoderModel) -> None:
        """Take nothing: it has all that it needs."""

    def predict(self, place: int, states: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab], of a head.

        Args:
            place: which head: by how many places its token is behind the next one.
            states: [rows, hidden], the hidden states of the other model behind its final norm, in
                the dtype of the weights.
        """
        for weight, bias in self.blocks[place]:
            states = states + F.silu(F.linear(states, weight, bias))
        head = self.lm_heads[0 if self._spec.shares_head else place]
        return F.linear(states, head) * self.config.logits_scale

    def _default_weights(self) -> NamedWeights:
        weights: NamedWeights = {}
        for head, blocks in enumerate(self.blocks):
            for layer, (weight, bias) in enumerate(blocks):
                weights[f"{BLOCKS}.{head}.layers.{layer}.weight"] = (weight,)
                if bias is not None:
                    weights[f"{BLOCKS}.{head}.layers.{layer}.bias"] = (bias,)
        for number, matrix in enumerate(self.lm_heads):
            name = "lm_head" if self._spec.shares_head else f"lm_heads.{number}"
            weights[f"{name}.weight"] = (matrix,)
        return weights
