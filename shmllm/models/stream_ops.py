"""The operations on several residual streams, a part of `ops.Ops`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm.models.connections import Connection


class StreamOps(Protocol):
    """The operations on several residual streams; see `ops.Ops`."""

    def stream(self, index: int) -> Tensor:
        """Returns one of several residual streams, [tokens, hidden]; the first one is the result of
        `embed`."""

    def match_magnitude(self, x: Tensor, like: Tensor, out: Tensor) -> None:
        """Computes ``x * rms(like) / rms(x)``, where the mean square of x is at least 1e-5.

        Args:
            x: [tokens, hidden].
            like: [tokens, hidden], rows whose root mean squares the result has.
            out: [tokens, hidden], the result; may be a stream that `x` is a projection of.
        """

    def predict_streams(self, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Predicts all streams in front of a layer, in place.

        With the coefficients ``c = prediction @ tanh(router_scale * routed)`` of a token,
        [streams, streams], stream i becomes ``streams[i] + sum(c[i, j] * streams[j])``.

        Args:
            routed: [tokens, streams].
            altup: the weights.

        Returns:
            [tokens, hidden], a copy of the active stream: the residual stream of the layer.
        """

    def correct_streams(self, residual: Tensor, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Corrects all streams behind a layer, in place.

        With the coefficients ``c = correction @ tanh(router_scale * routed) + 1`` of a token,
        [streams], stream i becomes ``streams[i] + c[i] * (residual - streams[active])``.

        Args:
            residual: [tokens, hidden], what the layer has made of the active stream; may be
                overwritten.
            routed: [tokens, streams].
            altup: the weights.

        Returns:
            [tokens, hidden], the active stream times ``altup.scale``, if there is one.
        """

    def add_to_streams(self, x: Tensor) -> None:
        """Adds ``x`` [tokens, hidden] to all streams but the first, in place."""

    def repeat_stream(self, residual: Tensor) -> None:
        """Makes each of the streams that `fold_streams` reads a copy of ``residual``, [tokens,
        hidden]."""

    def fold_streams(self, connection: Connection) -> Tensor:
        """Computes the gates of a connection, and the sum of all streams, each times its gate.

        With the streams s [streams, hidden] of a token and the norm ``r = sqrt(mean(s**2) +
        norm_eps)`` of all of them, gates are ``sigmoid(scale * (logits @ s) / r + bias) + eps``;
        the factor ``magnitude`` precedes the sigmoids of those of `spread`. `ConnectionSpec` says
        what a mixture of the streams changes.

        Args:
            connection: the weights.

        Returns:
            [tokens, hidden], which the next call overwrites.
        """

    def spread(self, x: Tensor, connection: Connection) -> None:
        """Adds ``x`` [tokens, hidden] to all streams, or to mixtures of them in their place, for
        each times the gate that the call of `fold_streams` before this one has computed, in place.

        Args:
            x: what a mixer or an MLP has computed of the result of that call.
            connection: the one of that call.
        """
