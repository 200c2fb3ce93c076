"""BitNet b1.58: ternary weights with one scale for a matrix (Ma et al., "The Era of 1-bit LLMs",
2024, section 2).

weight          [out / 4, in] uint8: bits 2 * i of row j have output i * out / 4 + j, by one more
                than its number -1, 0 or 1; or [out, in] floating numbers, see below
weight_scale    one number, which multiplies these if ``linear_class`` is "autobitlinear", and
                divides them if it is "bitlinear"

With ``quantization_mode`` "online" a checkpoint has the weights of training, [out, in], without
scales: their scale is their mean magnitude m, and the number of a weight w is w / m, rounded.
Otherwise floating numbers are multiplied by their scale, if they have one.

Activations are not rounded here; while a model is trained, it rounds them to 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shmllm.models.checkpoint_formats.components import FLOATS, Components, Method
from shmllm.models.checkpoint_formats.stored import FloatingMatrix, StoredMatrix
from shmllm.models.codes import RUN, quarter_bytes
from shmllm.models.fields import Fields
from shmllm.models.packed import PACKINGS

PER_BYTE = 4
_WEIGHT, _SCALE = ".weight", ".weight_scale"
_PROJECTION = "_proj.weight"
_DIVIDES = {"autobitlinear": False, "bitlinear": True}
_ONLINE = {"offline": False, "online": True}
_LEAST_MEAN = 1e-5


def configure(fields: Fields) -> BitNet:
    return BitNet(fields)


class BitNet(Method):
    components = (_SCALE,)

    def __init__(self, fields: Fields) -> None:
        self._divides = fields.meaning("linear_class", _DIVIDES, "bitlinear")
        self._is_online = fields.meaning("quantization_mode", _ONLINE, "offline")
        if self._is_online and self._divides:
            raise fields.error("quantization_mode 'online' needs linear_class 'autobitlinear'")
        if fields.flag("use_rms_norm", False):
            raise fields.error("use_rms_norm true is not supported; supported: false")
        left = fields.values.get("modules_to_not_convert")
        if left not in (None, ["lm_head"]) and self._is_online:
            raise fields.error(
                f"modules_to_not_convert {left!r} is not supported with quantization_mode "
                "'online'; supported: null"
            )

    def main(self, dtype: str, name: str) -> str | None:
        is_packed = dtype == "U8" and name.endswith(_WEIGHT)
        is_floating = dtype in FLOATS and name.endswith(_PROJECTION)
        return _WEIGHT if is_packed or is_floating else None

    def shape(self, parts: Components) -> tuple[int, int]:
        header = parts.header(_WEIGHT, ("U8", *FLOATS), (None, None))
        rows, width = header.shape
        return rows * (PER_BYTE if header.dtype == "U8" else 1), width

    def matrix(self, parts: Components) -> StoredMatrix:
        shape = self.shape(parts)
        if parts.header(_WEIGHT, ("U8", *FLOATS)).dtype == "U8":
            return PackedTernary(shape, self._scale(parts))
        if self._is_online:
            return RoundedTernary(shape)
        scale = self._scale(parts) if _SCALE in parts else torch.ones(())
        return FloatingMatrix(shape, lambda main, some: main[some].float() * scale)

    def _scale(self, parts: Components) -> Tensor:
        """Returns what numbers are multiplied by."""
        scale = parts.scales(_SCALE).float()
        if scale.numel() != 1 or (self._divides and bool(scale == 0)):
            raise parts.error(_SCALE, "must be one number, which is not 0")
        return 1 / scale.view(()) if self._divides else scale.view(())


class TernaryMatrix(StoredMatrix):
    """A matrix [out, in] of the numbers -1, 0 and 1 with one scale."""

    kind: str

    def numbers(self, main: Tensor, some: slice) -> Tensor:
        """Returns the numbers of some rows, by one more, [rows, in] uint8."""
        raise NotImplementedError

    def scale(self, main: Tensor) -> Tensor:
        """Returns the scale, one float32."""
        raise NotImplementedError

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        numbers = self.numbers(main, some)
        runs = pad(numbers, (0, -self.width % RUN), value=1).unflatten(1, (-1, RUN))
        scales = self.scale(main).to(PACKINGS[self.kind].parameters.dtype)
        return quarter_bytes(runs).flatten(1), scales.expand(*runs.shape[:2])

    def values(self, main: Tensor, some: slice) -> Tensor:
        return (self.numbers(main, some).float() - 1) * self.scale(main)


class PackedTernary(TernaryMatrix):
    """One whose numbers are packed; see the module.

    Args:
        shape: [out, in].
        scale: one float32.
    """

    def __init__(self, shape: tuple[int, int], scale: Tensor) -> None:
        super().__init__(shape)
        self._scale = scale
        self.kind = "ternary" if torch.equal(scale.half().float(), scale) else "ternary-f32"

    def numbers(self, main: Tensor, some: slice) -> Tensor:
        rows = torch.arange(some.start, some.stop)
        shifts = 2 * (rows // len(main)).to(torch.uint8)
        return main[rows % len(main)] >> shifts[:, None] & 3

    def scale(self, main: Tensor) -> Tensor:
        return self._scale


class RoundedTernary(TernaryMatrix):
    """One whose numbers are the weights of training, rounded.

    Args:
        shape: [out, in].
    """

    kind = "ternary-f32"

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self._inverse: Tensor | None = None

    def numbers(self, main: Tensor, some: slice) -> Tensor:
        scaled = main[some].float() * self._inverse_of(main)
        return (scaled.round_().clamp_(-1, 1) + 1).to(torch.uint8)

    def scale(self, main: Tensor) -> Tensor:
        return 1 / self._inverse_of(main)

    def _inverse_of(self, main: Tensor) -> Tensor:
        """Returns what weights are multiplied by, once for the matrix."""
        if self._inverse is None:
            self._inverse = 1 / main.float().abs().mean().clamp(min=_LEAST_MEAN)
        return self._inverse
