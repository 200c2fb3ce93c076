"""A model that drafts a block of tokens at once: which operations, in which order."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import Rename
from shmllm.models.drafting_model import DraftingModel
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.logits_ops import LogitsOps
from shmllm.models.ops import Ops


class BlockModel(DraftingModel):
    """See `BlockSpec`. Its forward pass is that of any decoder.

    Args:
        config: the configuration, with a `BlockSpec`.
        storage: allocates the weights.
        renames: those of `DecoderModel`.

    Attributes:
        projection: makes one hidden state of several.
        source_norm: the norm of that.
    """

    def __init__(self, config: ModelConfig, storage: Storage, *renames: Rename | None) -> None:
        super().__init__(config, storage, *renames)
        spec, hidden = self._drafting, config.hidden_size
        width = spec.num_levels * spec.source_width
        self.projection = Linear(width, [hidden], spec.has_bias, storage)
        self.source_norm = Norm(hidden, config.norm, storage)

    @property
    def own_norms(self) -> dict[str, Norm]:
        return {"hidden_norm": self.source_norm}

    def combine(self, ops: LogitsOps, sources: Tensor) -> Tensor:
        return ops.norm(ops.linear(sources, self.projection), self.source_norm)

    def store(self, ops: Ops, states: Tensor) -> None:
        """Stores the keys and values of the step's tokens, for blocks behind them.

        Args:
            ops: the operations of the device.
            states: [tokens, hidden], what `combine` returned for them.
        """
        for layer in self.layers:
            assert isinstance(layer.mixer, Attention), "its layers are Qwen3's"
            ops.store_heads(ops.linear(states, layer.mixer.qkv_proj), layer.mixer)

    def _default_weights(self) -> NamedWeights:
        return super()._default_weights() | self.projection.named_weights("fc")
