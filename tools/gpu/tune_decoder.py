"""Measures all layers of a decoder in one launch against the launches that it replaces.

A case is the layers of a model for one number of decodes. A candidate that is no default is
measured as launches of their own, with the table's other tiles: so the entry becomes a default
where one launch is faster. This module must not know how a search measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpu.decode_layers import MODELS, DecodeLayers, numbers_of_decodes
from gpu.search import Search
from gpu.settings import Settings
from shmllm_kernels.gpu.configs import has_dependent_launches, num_multiprocessors
from shmllm_kernels.gpu.decoder import (
    DecoderLayers,
    LayerOperands,
    attention_tile,
    run_layers,
    splits_at_once,
)
from shmllm_kernels.gpu.row_configs import DECODER, DecoderConfig
from shmllm_kernels.gpu.tiles import ANY, Tiles

LAUNCHES = tuple(
    DecoderConfig(*each, is_default=0) for each in ((16, 64, 8, 3, 1, 4), (16, 64, 8, 2, 1, 0))
)
CANDIDATES = (
    *LAUNCHES,
    *(
        DecoderConfig(*each, is_default=1)
        for each in (
            *((16, 64, 8, 3, 1, ahead) for ahead in (0, 4, 16)),
            *((16, 64, 8, 2, 1, 4), (16, 128, 8, 2, 1, 4), (16, 32, 16, 3, 1, 4)),
            *((32, 64, 8, 2, 1, 4), (16, 64, 4, 3, 2, 4), (16, 32, 8, 3, 2, 4)),
        )
    ),
)
"""Rows of the matrix, elements of half a slice, warps, stages, programs, iterations ahead. They are
few: each is compiled four times, for two models and one or eight rows, in five to ten seconds."""
REHEARSED = tuple(DecoderConfig(16, 16, 2, 2, 1, 0, is_default) for is_default in (0, 1))


class DecoderCase(DecodeLayers):
    """Layers in one launch, or as launches of their own."""

    def _work(self, config: DecoderConfig, layers: list[LayerOperands]) -> Callable[[], object]:
        shape, splits = self._shape, self._splits()
        if not config.is_default:
            return partial(self._launch, layers, 0)
        programs = config.programs * num_multiprocessors(self._device)
        attention = attention_tile(self._attention(splits > 1), shape.head_dim)
        splits = splits_at_once(splits, programs, self._rows, shape.kv_heads)
        return partial(
            run_layers, self._stream, DecoderLayers(layers, self._numbers), self._memory,
            self._starts, self._contexts, config, attention, programs,
            splits, self._scratch(splits), 1, has_dependent_launches(self._device),
        )  # fmt: skip


def searches(settings: Settings) -> Iterator[Search]:
    for size, model in MODELS.items():
        tiles, candidates = DECODER, CANDIDATES
        if settings.rehearsal:
            tiles, candidates = Tiles(tiles.kernel, {(ANY, size): REHEARSED[0]}), REHEARSED
        yield Search(tiles, size, partial(cases, model), candidates)


def cases(model: str, settings: Settings) -> Sequence[DecoderCase]:
    return [DecoderCase(settings, model, rows) for rows in numbers_of_decodes(settings)]
