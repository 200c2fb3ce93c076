"""Which weights the attention of a few tokens asks the L2 cache for.

Those of the products behind it: its output projection, and the beginning of the MLP's first matrix.
The table of tiles says how many bytes, so that nothing is asked for where that has not been
measured to be faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.decoder import DecoderModel
from shmllm.models.decoder_layer import DecoderLayer
from shmllm.models.layers import Linear
from shmllm.models.matrices import parts_of
from shmllm.models.mlp import MLP
from shmllm.worker.gpu.products import rows_of
from shmllm_kernels.gpu.configs import device_key, has_dependent_launches
from shmllm_kernels.gpu.products import memory_of
from shmllm_kernels.gpu.row_configs import ahead_config
from shmllm_kernels.gpu.weights_ahead import WeightsAhead


def weights_ahead(model: DecoderModel, device: torch.device) -> dict[int, WeightsAhead]:
    """Return what attention asks for, by layer: nothing for layers that are not in it.

    Args:
        model: the model; the addresses of its weights must not change.
        device: the device; before compute capability 9.0 it cannot be asked.
    """
    num_bytes = 1024 * ahead_config(model.config.hidden_size, device_key(device)).kib
    if not num_bytes or not has_dependent_launches(device):
        return {}
    return {
        index: _behind(layer.mixer, layer, num_bytes)
        for index, layer in enumerate(model.layers)
        if isinstance(layer.mixer, Attention)
    }


def _behind(attention: Attention, layer: DecoderLayer, num_bytes: int) -> WeightsAhead:
    output, mlp = _memory(attention.o_proj), layer.mlp
    if not isinstance(mlp, MLP):
        return WeightsAhead.of(num_bytes, output, None, is_gated=False)
    return WeightsAhead.of(num_bytes, output, _memory(mlp.gate_up_proj), mlp.spec.gated)


def _memory(linear: Linear) -> Tensor:
    """Return the weights, or the codes of packed ones, of the first rows that have one format."""
    return memory_of(rows_of(parts_of(linear.weight)[0]))[0]
