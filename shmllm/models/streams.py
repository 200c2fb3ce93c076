"""Several residual streams (AltUp), and a branch beside a mixer (LAuReL): which operations they
consist of. The streams are buffers of `ops.Ops`; `altup.py` has the weights."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.altup import AltUp, AltUpLayer, Laurel
from shmllm.models.ops import Ops

SQRT_HALF = 0.5**0.5


def begin_streams(ops: Ops, altup: AltUp) -> None:
    """Makes the others of the first stream."""
    first = ops.stream(0)
    for index, projection in enumerate(altup.projections, 1):
        ops.match_magnitude(ops.linear(first, projection), first, ops.stream(index))


def end_streams(ops: Ops, altup: AltUp) -> Tensor:
    """Returns the mean of the first stream and of projections of the others, [tokens, hidden]."""
    first, others = ops.stream(0), []
    for index, projection in enumerate(altup.unembeddings, 1):
        others.append(ops.stream(index))
        ops.match_magnitude(ops.linear(others[-1], projection), first, others[-1])
    for stream in others:
        ops.add_norm(stream, first, None, 1.0)
    return ops.scale(first, 1 / (1 + len(others)))


def predict_streams(ops: Ops, altup: AltUpLayer) -> Tensor:
    """Predicts all streams in front of a layer, and returns what it reads and changes, [tokens,
    hidden]."""
    return ops.predict_streams(_routed(ops, ops.stream(altup.spec.active), altup), altup)


def correct_streams(ops: Ops, residual: Tensor, altup: AltUpLayer) -> Tensor:
    """Corrects all streams by what a layer has made of the active one, and returns what the
    projection of its own input reads, [tokens, hidden]."""
    return ops.correct_streams(residual, _routed(ops, residual, altup), altup)


def _routed(ops: Ops, x: Tensor, altup: AltUpLayer) -> Tensor:
    return ops.linear(ops.add_norm(None, x, altup.router_norm, 1.0), altup.router)


def add_laurel(ops: Ops, x: Tensor, residual: Tensor, laurel: Laurel) -> None:
    """Adds ``x``, what a mixer reads, and its branch of low rank to the residual stream, in place,
    and divides the sum by sqrt(2): the mixer's output is to be added with that factor, too."""
    low = ops.norm(ops.linear(ops.linear(x, laurel.left), laurel.right), laurel.norm)
    ops.add_norm(x, residual, None, 1.0)
    ops.add_norm(low, residual, None, 1.0)
    ops.scale(residual, SQRT_HALF)
