"""The projections that a step of a model computes: those that low-rank adapters may change.

The model itself says which: it runs with operations that compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shmllm.models.decoder import DecoderModel
from shmllm.models.experts import ExpertLinear, MoE
from shmllm.models.layers import Linear
from shmllm.models.mlp import MLP
from shmllm.models.ops import Ops

Computed = Linear | ExpertLinear
"""What a step computes: one product, or one for each expert."""


class _Collector:
    """Stands in for `Ops`: it computes nothing, and keeps the weights of products. All results are
    the same object, which is not None: a model may ask for that."""

    def __init__(self) -> None:
        self.linears: dict[int, Computed] = {}
        self._result = object()

    def linear(self, x: object, linear: Linear) -> object:
        return self._keep(linear)

    def low_rank(self, x: object, down: Linear, up: Linear) -> object:
        return self._keep(down, up)

    def mlp(self, x: object, mlp: MLP) -> object:
        return self._keep(mlp.gate_up_proj, mlp.down_proj)

    def route(self, x: object, moe: MoE) -> object:
        return self._keep(moe.router)

    def experts(self, x: object, routing: object, moe: MoE) -> object:
        if moe.shared is not None:
            self.mlp(x, moe.shared)
        return self._keep(moe.gate_up_proj, moe.down_proj)

    def _keep(self, *linears: Computed) -> object:
        self.linears |= {id(linear): linear for linear in linears}
        return self._result

    def __getattr__(self, operation: str) -> Callable[..., object]:
        return lambda *arguments, **options: self._result


def computed_linears(model: DecoderModel) -> list[Computed]:
    """Returns the projections that a step computes by `Ops.linear`, `Ops.low_rank`, `Ops.mlp`,
    `Ops.route` and `Ops.experts`, in their order."""
    collector = _Collector()
    model.forward(cast(Ops, collector))
    return list(collector.linears.values())
