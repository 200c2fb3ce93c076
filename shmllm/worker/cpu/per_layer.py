"""The inputs that each layer has of its own, on a CPU: a product and a lookup, then gates."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.products import Products, kind_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.per_layer import EMBED_PER_LAYER, GATE_LAYER_INPUT


class PerLayerOps:
    """Records the operations of `models.ops.Ops` on these inputs in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        inputs: the inputs that the kernels read.
        buffer: [max_tokens, layers * width], for the inputs of all layers; None: there are none.
        gated: [max_tokens, width], for the result of a gate; None: there are no inputs. It is
            none of the buffers of products: one of the same width reads it.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        inputs: CpuInputs,
        buffer: Tensor | None,
        gated: Tensor | None,
    ) -> None:
        self._kernels = program
        self._products = products
        self._inputs = inputs
        self._num_tokens = inputs.address_of("num_tokens")
        self._buffer = buffer
        self._gated = gated

    def embed(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        """Record `Ops.embed_per_layer`."""
        spec, norm, table, out = inputs.spec, inputs.norm, inputs.table, self._inputs_of_layers
        self._products.record(self._num_tokens, hidden, inputs.projection, out)
        numbers = [word_of_float(number) for number in (norm.spec.eps, inputs.projection_scale)]
        operands = [
            self._num_tokens, out.data_ptr(), inputs.num_layers, spec.width,
            norm.weight.data_ptr(), *numbers, self._inputs.token_ids.ctypes.data, table.data_ptr(),
            word_of_float(inputs.scale), spec.padding, spec.vocab_size,
        ]  # fmt: skip
        self._kernels.record(EMBED_PER_LAYER[kind_of(table)], operands, label="embed_per_layer")

    def gate(self, x: Tensor, layer: LayerInput) -> Tensor:
        """Record `Ops.gate_layer_input`."""
        width, inputs = layer.spec.width, self._inputs_of_layers
        source = [inputs.data_ptr() + 4 * layer.layer * width, 4 * inputs.shape[1]]
        assert self._gated is not None, "the model has such inputs"
        operands = [self._num_tokens, x.data_ptr(), width, *source, self._gated.data_ptr()]
        kernel = GATE_LAYER_INPUT[layer.spec.activation]
        self._kernels.record(kernel, operands, label="gate_layer_input")
        return self._gated

    @property
    def _inputs_of_layers(self) -> Tensor:
        assert self._buffer is not None, "the model has such inputs"
        return self._buffer
