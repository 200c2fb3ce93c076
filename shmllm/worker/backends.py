"""What an engine computes with: the one place that chooses products and attention.

Must not know how either of them works.
"""

from __future__ import annotations

import torch

from shmllm.config import LoadConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.products import MakeProduct, PlainProduct, fastest_product
from shmllm.models.quantized import Int8Product
from shmllm.worker.attention import ANY_SHAPES, PagedAttention
from shmllm.worker.attention_groups import CallShapes
from shmllm.worker.attention_shapes import find_alike_shapes
from shmllm.worker.determinism import check_bits, fitting_lengths, make_deterministic
from shmllm.worker.memory import CacheSize
from shmllm.worker.slabs import Slabs

PRODUCTS: dict[str | None, MakeProduct] = {None: fastest_product, "int8": Int8Product}


def choose_products(model: DecoderModel, load: LoadConfig, *, has_room: bool) -> None:
    """Decide how a model multiplies, and derive what that needs.

    Args:
        model: with its weights.
        load: says whether they are quantized, and whether no number may depend on the batch.
        has_room: whether all weights fit into memory once more.

    Raises:
        EngineStartError: that cannot be held here.
    """
    kinds = [PRODUCTS[load.quantization]] if has_room or load.quantization else []
    if load.quantization is None:
        kinds.append(PlainProduct)
    if load.deterministic:
        make_deterministic(model, kinds)
    else:
        model.use_products(kinds[0])
    model.derive()


def choose_attention(
    model: DecoderModel,
    cache: torch.Tensor,
    num_rows: int,
    size: CacheSize,
    *,
    deterministic: bool,
) -> PagedAttention:
    """The attention of a model whose products are chosen.

    Args:
        model: with its weights.
        cache: as `PagedAttention` takes it, zeroed.
        num_rows: requests that can run at once.
        size: of the cache, and of what lies beside it.
        deterministic: whether no number may depend on the batch.

    Raises:
        EngineStartError: that cannot be held here.
    """
    config, dtype = model.config, model.dtype
    shapes: CallShapes = find_alike_shapes(config, dtype) if deterministic else ANY_SHAPES
    longest = shapes.padded_context(size.max_model_len)
    slabs = Slabs(config, dtype, num_rows, longest, size.slab_bytes)
    attention = PagedAttention(config, cache, slabs, shapes)
    if deterministic:
        block_size = cache.shape[3]
        lengths = fitting_lengths(num_rows, size.num_blocks - 1, block_size, size.max_model_len)
        check_bits(model, attention, lengths, block_size)
        attention.drop_workspace()
    return attention
