"""Measures how many weights the attention of decodes should ask the L2 cache for.

A case is the layers of a model for one number of decodes, five launches a layer. This module must
not know how a search measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpu.decode_layers import MODELS, DecodeLayers, numbers_of_decodes
from gpu.search import Search
from gpu.settings import Settings
from shmllm_kernels.gpu.decoder import LayerOperands
from shmllm_kernels.gpu.row_configs import AHEAD, AheadConfig

CANDIDATES = tuple(AheadConfig(1024 * mib) for mib in (0, 4, 8, 16, 24, 32))
"""An MiB is read in 0.25 us. The L2 cache of an H100 or H200 has 50 MB."""


class AheadCase(DecodeLayers):
    """Layers whose attention asks for some weights."""

    def _work(self, config: AheadConfig, layers: list[LayerOperands]) -> Callable[[], object]:
        return partial(self._launch, layers, 1024 * config.kib)


def searches(settings: Settings) -> Iterator[Search]:
    candidates = CANDIDATES[:2] if settings.rehearsal else CANDIDATES
    for size, model in MODELS.items():
        yield Search(AHEAD, size, partial(cases, model), candidates)


def cases(model: str, settings: Settings) -> Sequence[AheadCase]:
    return [AheadCase(settings, model, rows) for rows in numbers_of_decodes(settings)]
