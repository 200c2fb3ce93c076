"""What decides which experts tokens have on a GPU, beside the router's output."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shmllm.models.routing import Routing
from shmllm.models.specs import MoESpec, TokenKind
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm_kernels.gpu.left_out import leave_out
from shmllm_kernels.gpu.routing_by_token import route_by_token
from shmllm_kernels.reference.moe import Choice


def choice_of(spec: MoESpec) -> Choice:
    """Return how a mixture's experts are chosen."""
    return Choice(
        divides_by_all=spec.divides_by_all,
        is_sigmoid=spec.scoring in ("sigmoid", "sigmoid_of_top", "sqrt_softplus"),
        is_sqrt_softplus=spec.scoring == "sqrt_softplus",
        ranks_logits=spec.scoring == "sigmoid_of_top",
        total_eps=spec.total_eps,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        num_best=spec.best_of_group,
        scale=spec.weight_scale,
        mixer_limit=spec.mixer_limit,
    )


class TokenKinds:
    """Leaves tokens out of mixtures that have one kind of them, or chooses their experts by their
    ids.

    Args:
        inputs: the step's inputs.
        specs: the mixtures.
    """

    def __init__(self, inputs: GpuInputs, specs: Iterable[MoESpec]) -> None:
        self._inputs = inputs
        self._listed = {
            spec.tokens: torch.tensor(spec.tokens.ids, device=inputs.last_tokens.device)
            for spec in specs
            if spec.tokens is not None
        }

    def route(
        self,
        ids: Tensor,
        weights: Tensor,
        logits: Tensor,
        query_starts: Tensor,
        choice: Choice,
        table: Tensor,
    ) -> None:
        """Launch the choice of experts that a table has for each id; see `route_by_token`."""
        inputs, tokens = self._inputs, self._inputs.step.token_ids[: len(ids)]
        routed = ids, weights, logits, query_starts, choice
        route_by_token(*routed, tokens, inputs.last_tokens, table)

    def leave_out(self, kind: TokenKind, routing: Routing) -> None:
        """Launch that tokens of another kind go to no expert."""
        ids, inputs = routing.ids, self._inputs
        leave_out(
            ids, routing.weights, inputs.step.token_ids[: len(ids)], inputs.last_tokens,
            self._listed[kind], kind.are_listed,
        )  # fmt: skip
