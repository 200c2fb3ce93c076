"""The inputs that each layer has of its own, on a GPU: a product and a lookup, then gates."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.products import GpuProducts
from shmllm_kernels.gpu.per_layer import embed_per_layer, gate_layer_input


class PerLayerOps:
    """Launches the operations of `models.ops.Ops` on these inputs.

    Args:
        products: launches matrix products.
        inputs: the step's inputs.
        buffer: [max_tokens, layers * width], for the inputs of all layers; None: there are none.
    """

    def __init__(self, products: GpuProducts, inputs: GpuInputs, buffer: Tensor | None) -> None:
        self._products = products
        self._inputs = inputs
        self._buffer = buffer

    def embed(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        """Launch `Ops.embed_per_layer`."""
        out, norm = self._of_layers(len(hidden)), inputs.norm
        self._products.linear(out, hidden, inputs.projection)
        embed_per_layer(
            out,
            inputs.table,
            self._inputs.step.token_ids[: len(hidden)],
            self._inputs.last_tokens,
            norm.weight,
            norm.spec.eps,
            inputs.projection_scale,
            inputs.scale,
            inputs.spec.padding,
        )

    def gate(self, x: Tensor, layer: LayerInput) -> Tensor:
        """Launch `Ops.gate_layer_input`. The result replaces the inputs."""
        out = self.of_layer(len(x), layer)
        gate_layer_input(out, x, layer.spec.activation)
        return out

    def of_layer(self, num_tokens: int, layer: LayerInput) -> Tensor:
        """Return the inputs of a layer, [tokens, width], of which each step makes new ones."""
        width = layer.spec.width
        return self._of_layers(num_tokens)[:, layer.layer * width : (layer.layer + 1) * width]

    def _of_layers(self, num_tokens: int) -> Tensor:
        assert self._buffer is not None, "the model has such inputs"
        return self._buffer[:num_tokens]
