"""A Q-Former (Li et al., "BLIP-2", 2023), which reads the results of an encoder of sounds window by
window."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.conformer_specs import QFormer
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.encoder_spec import LayerSpec

_PROJECTOR = "projector."
_LAYERS = f"{_PROJECTOR}qformer.encoder.layer."


class QFormerProjector:
    """
    Args:
        spec: what it computes.
        read_width: the width of what it reads.
        hidden_size: the width of the language model's embeddings.
        tower: owns the weights.
    """

    def __init__(self, spec: QFormer, read_width: int, hidden_size: int, tower: Tower) -> None:
        self._spec = spec
        width = spec.hidden_size
        self._queries = tower.tensor(f"{_PROJECTOR}query", 1, spec.num_queries, width)
        self._norm = tower.make_layer_norm(f"{_PROJECTOR}qformer.layernorm", width, spec.eps)
        self._layers = [
            QFormerLayer(
                spec, f"{_LAYERS}{layer}", read_width, tower, reads=not layer % spec.reads_every
            )
            for layer in range(spec.num_layers)
        ]
        self._project = tower.make_dense(f"{_PROJECTOR}linear", hidden_size, width)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the embeddings of all windows, [frames, read_width] -> [embeddings, hidden_size].
        Zeros fill the last window."""
        window = self._spec.window
        windows = F.pad(x, (0, 0, 0, -len(x) % window)).unflatten(0, (-1, window))
        queries = self._norm(self._queries).expand(len(windows), -1, -1)
        for layer in self._layers:
            queries = layer(queries, windows)
        return self._project(queries.flatten(0, 1))


class QFormerLayer:
    """Attention of queries to one another, attention to the window in some layers, and an MLP, each
    before the norm of a sum."""

    def __init__(
        self, spec: LayerSpec, prefix: str, read_width: int, tower: Tower, *, reads: bool
    ) -> None:
        self._activation = ACTIVATIONS[spec.activation]
        width = spec.hidden_size
        self._own = _Attention(spec, f"{prefix}.attention", width, tower)
        self._read = (
            _Attention(spec, f"{prefix}.crossattention", read_width, tower) if reads else None
        )
        self._up = tower.make_dense(f"{prefix}.intermediate_query.dense", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.output_query.dense", width, spec.inner)
        self._norm = tower.make_layer_norm(f"{prefix}.output_query.LayerNorm", width, spec.eps)

    def __call__(self, x: Tensor, windows: Tensor) -> Tensor:
        """Runs the layer: [windows, queries, width] -> [windows, queries, width]."""
        x = self._own(x, x)
        if self._read is not None:
            x = self._read(x, windows)
        rows = x.flatten(0, 1)
        added = self._down(self._activation(self._up(rows)))
        return self._norm(rows + added).view(x.shape)


class _Attention:
    """Attention to others, which have the width ``read_width``."""

    def __init__(self, spec: LayerSpec, prefix: str, read_width: int, tower: Tower) -> None:
        width, self._heads = spec.hidden_size, spec.num_heads
        self._q = tower.make_dense(f"{prefix}.attention.query", width, width)
        self._kv = [
            tower.make_dense(f"{prefix}.attention.{name}", width, read_width)
            for name in ("key", "value")
        ]
        self._out = tower.make_dense(f"{prefix}.output.dense", width, width)
        self._norm = tower.make_layer_norm(f"{prefix}.output.LayerNorm", width, spec.eps)

    def __call__(self, x: Tensor, others: Tensor) -> Tensor:
        """Runs it: [windows, queries, width] -> [windows, queries, width].

        Args:
            x: the queries.
            others: [windows, n, read_width], what they read.
        """
        rows, heads = x.flatten(0, 1), (self._heads, -1)
        q = self._q(rows).view(*x.shape[:2], *heads)
        k, v = (dense(others.flatten(0, 1)).view(*others.shape[:2], *heads) for dense in self._kv)
        read = attend(q, k, v).reshape(rows.shape)
        return self._norm(self._out(read) + rows).view(x.shape)
