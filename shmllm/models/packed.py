"""Matrices of few bits whose elements share parameters in groups: the blocks of GGUF files, and
what other quantised checkpoints have.

    kind        an element    parameters of a group         value
    int4        4 bits        32: scale float16             (q - 8) * scale       GGUF's Q4_0
    int4-g64    4 bits        64: scale float16             (q - 8) * scale
    q4_1        4 bits        32: scale, offset float16     q * scale + offset
    q5_0        5 bits        32: scale float16             (q - 16) * scale
    q5_1        5 bits        32: scale, offset float16     q * scale + offset
    q8_0        8 bits        32: scale float16             q * scale
    q4_k        4 bits        32: scale, offset 6 bits      q * scale + offset
    q5_k        5 bits        32: scale, offset 6 bits      q * scale + offset
    q6_k        6 bits        16: scale 8 bits              (q - 32) * scale
    q2_k        2 bits        16: scale, offset 4 bits      q * scale + offset
    q3_k        3 bits        16: scale 8 bits              (q - 4) * scale
    ternary     2 bits        64: scale float16             (q - 1) * scale       TQ1_0, TQ2_0
    ternary-f32 2 bits        64: scale float32             (q - 1) * scale       BitNet's
    iq4_nl      iq4           32: scale float16             q * scale
    iq4_xs      iq4           32: scale 8 bits              q * scale
    iq3_s       iq3_s         32: scale 8 bits              q * scale
    iq3_xxs     iq3_xxs       32: scale 8 bits              q * scale
    iq2         iq2           16: scale 8 bits              q * scale             IQ2_XXS, _XS, _S
    iq1         iq1           16: scale 8 bits              q * scale             IQ1_S, IQ1_M
    nf4         nf4           64: scale float32             q * scale
    mxfp4       e2m1          32: scale, a power of two     q * scale
    nvfp4       e2m1          16: scale e4m3 * float32      q * scale
    fp8         e4m3          64: scale float32             q * scale
    w4-*        4 bits        32 or 64: scale               (q - 8) * scale
    w4z-*       4 bits        32 or 64: scale, zero         (q - zero) * scale
    w8-*        8 bits        32 or 64: scale               q * scale

Every operation is rounded to float32 by itself. A row is padded to whole runs of 64 elements.
Kernels read the same memory: `shmllm_kernels.cpu.unpacking`. A kind is one row of `PACKINGS`; this
module must not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.codes import CODES, RUN, Codes
from shmllm.models.group_parameters import PARAMETERS, Parameters
from shmllm.models.quantized import Allocate, QuantizedMatrix

Exact = tuple[Tensor, Tensor | None]
"""The scales and the offsets or zeros of groups, [rows, groups] float32."""


Fit = Callable[[Tensor, float], Exact]
"""(values [rows, groups, group], largest number) -> parameters that represent them."""
_MULTIPLES = (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True, slots=True)
class Form:
    """What an element's number and its group's parameters mean.

    Attributes:
        num_parameters: of a group.
        value: (numbers, scales, the other parameters) -> values, all float32.
        fit: finds the parameters.
        number: (values, parameters [rows, groups, 1]) -> numbers, not yet rounded to codes.
    """

    num_parameters: int
    value: Callable[[Tensor, Tensor, Any], Tensor]
    fit: Fit
    number: Callable[[Tensor, Tensor, Any], Tensor]


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _fit_largest(values: Tensor, largest: float) -> Exact:
    """The element of the largest magnitude becomes ``-largest``, with its sign in the scale."""
    places = values.abs().argmax(-1, keepdim=True)
    return values.gather(-1, places)[..., 0] / -largest, None


def _fit_magnitude(values: Tensor, largest: float) -> Exact:
    return values.abs().amax(-1) / largest, None


def _fit_mean(values: Tensor, largest: float) -> Exact:
    """The scale of BitNet's ternary weights: the mean magnitude; that of the numbers that are not
    zero if it is the same of all, so that ternary weights stay what they are."""
    magnitudes = values.abs()
    most = magnitudes.amax(-1)
    is_ternary = ((magnitudes == 0) | (magnitudes == most[..., None])).all(-1)
    return torch.where(is_ternary, most, magnitudes.mean(-1)) / largest, None


def _fit_range(values: Tensor, largest: float) -> Exact:
    low, high = values.amin(-1), values.amax(-1)
    return (high - low) / largest, low


def _fit_range_below_zero(values: Tensor, largest: float) -> Exact:
    low, high = values.amin(-1).clamp_max(0), values.amax(-1)
    return ((high - low) / largest).clamp_min(0), low


def _fit_zero(values: Tensor, largest: float) -> Exact:
    low, high = values.amin(-1).clamp_max(0), values.amax(-1).clamp_min(0)
    scale = (high - low) / largest
    return scale, (-low * _inverse(scale)).round_()


def _searched(fit: Fit, nearest: Callable[[Tensor], Tensor]) -> Fit:
    """Returns a fit that tries a few multiples of another one's scales, and takes those whose
    errors have the smallest squares: few numbers fit outliers badly."""

    def search(values: Tensor, largest: float) -> Exact:
        found = first = fit(values, largest)[0]
        smallest = torch.full_like(first, torch.inf)
        for multiple in _MULTIPLES:
            scales = (first * multiple)[..., None]
            errors = (nearest(values * _inverse(scales)) * scales - values).square_().sum(-1)
            found = torch.where(errors < smallest, scales[..., 0], found)
            smallest = torch.minimum(errors, smallest)
        return found, None

    return search


def _fit_power(values: Tensor, largest: float) -> Exact:
    """The power of two that OCP's MX specification gives a group: that of its largest magnitude,
    divided by that of the largest number."""
    magnitudes = values.abs().amax(-1)
    power = torch.frexp(torch.tensor(float(largest))).exponent
    exponents = (torch.frexp(magnitudes).exponent - power).clamp(-127, 127)
    return torch.ldexp(
        torch.ones_like(magnitudes), exponents.masked_fill(magnitudes == 0, -127)
    ), None


def _scaled(bias: float, fit: Fit) -> Form:
    return Form(
        1,
        lambda q, scale, _: (q - bias if bias else q) * scale,
        fit,
        lambda x, scale, _: x * _inverse(scale) + bias,
    )


def _offset(fit: Fit) -> Form:
    return Form(
        2,
        lambda q, scale, offset: q * scale + offset,
        fit,
        lambda x, scale, offset: (x - offset) * _inverse(scale),
    )


_ZERO = Form(
    2,
    lambda q, scale, zero: (q - zero) * scale,
    _fit_zero,
    lambda x, scale, zero: x * _inverse(scale) + zero,
)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a kind stores rows.

    Attributes:
        codes: how the numbers of a run are stored.
        group: the number of elements that share parameters.
        form: what they mean.
        parameters: how these are stored.
        largest: the largest number, or for signed scales the largest magnitude.
    """

    kind: str
    codes: Codes
    group: int
    form: Form
    parameters: Parameters
    largest: float

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> PackedMatrix:
        """Allocates a matrix [..., out, in] whose values are not set."""
        runs = -(-shape[-1] // RUN)
        integers = allocate((*shape[:-1], runs * self.codes.run_bytes), self.codes.dtype)
        width = self.parameters.width(runs, RUN // self.group * self.form.num_parameters)
        scales = allocate((*shape[:-1], width), self.parameters.dtype)
        return PackedMatrix(self, integers, scales, shape[-1], dtype)

    def values(self, integers: Tensor, scales: Tensor) -> Tensor:
        """Returns the values of rows, [rows, padded] float32."""
        numbers = self.codes.numbers(integers)
        groups = numbers.view(len(numbers), -1, self.group)
        scale, other = self._split(self._widened(scales))
        out = self.form.value(groups, scale[..., None], None if other is None else other[..., None])
        return out.flatten(1)

    def round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        """Rounds rows [rows, padded] of float32."""
        groups = values.view(len(values), -1, self.group)
        exact = self.form.fit(groups, self.largest)
        self.parameters.store(self._joined(*exact), scales)
        stored = self._split(self._widened(scales))
        # A format that rounds its parameters much rounds the elements for the rounded ones.
        scale, other = stored if self.parameters.is_coarse else exact
        scale = torch.where(stored[0] == 0, 0.0, scale)
        other = None if other is None else other[..., None]
        numbers = self.form.number(groups, scale[..., None], other)
        self.codes.store(numbers.flatten(1), integers)

    def _widened(self, scales: Tensor) -> Tensor:
        """Returns the parameters of each run, [rows, runs, parameters] float32."""
        return self.parameters.widened(scales, RUN // self.group * self.form.num_parameters)

    def _split(self, parameters: Tensor) -> Exact:
        if self.form.num_parameters == 1:
            return parameters.flatten(1), None
        scales, others = parameters.unflatten(2, (2, -1)).unbind(2)
        return scales.flatten(1), others.flatten(1)

    def _joined(self, scales: Tensor, others: Tensor | None) -> Tensor:
        per_run = RUN // self.group
        parts = [part.unflatten(1, (-1, per_run)) for part in (scales, others) if part is not None]
        return torch.cat(parts, 2)


class PackedMatrix(QuantizedMatrix):
    """A matrix of one of the `PACKINGS`; see `QuantizedMatrix`."""

    def __init__(
        self, packing: Packing, integers: Tensor, scales: Tensor, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__(integers, scales, width, dtype)
        self.packing = packing

    @property
    def kind(self) -> str:
        return self.packing.kind

    def of_parts(self, integers: Tensor, scales: Tensor) -> Self:
        return type(self)(self.packing, integers, scales, self._width, self.dtype)

    def columns_of(self, integers: Tensor, scales: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        if begin % (RUN * self.packing.parameters.record_runs):
            raise EngineStartError(
                f"rows stored as {self.kind} cannot be divided at column {begin:,}: take another "
                "number of ranks"
            )
        found, runs = [], -(-self._width // RUN)
        for whole, own in ((integers, self.integers), (scales, self.scales)):
            at = begin // RUN * own.shape[-1] // runs
            found.append(whole[..., at : at + own.shape[-1]])
        return found[0], found[1]

    def copy_columns(self, values: Tensor, columns: slice) -> None:
        ends = {columns.start, columns.stop} - {values.shape[-1]}
        if any(end % self.packing.group for end in ends):
            raise EngineStartError(
                f"rows rounded to {self.kind} cannot be divided at column {max(ends):,}, within a "
                f"group of {self.packing.group}: take another number of ranks, or 8 bits"
            )
        super().copy_columns(values, columns)

    def _round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        padded = values.new_zeros(len(values), -(-self._width // RUN) * RUN)
        padded[:, : self._width] = values
        self.packing.round(padded, integers, scales)

    def _values(self, integers: Tensor, scales: Tensor) -> Tensor:
        return self.packing.values(integers, scales)[:, : self._width]


def _of_table(
    kind: str, name: str, group: int, parameters: Parameters, largest: float,
    fit: Fit = _fit_magnitude,
) -> Packing:  # fmt: skip
    """A packing whose codes stand for numbers of a table."""
    codes = CODES[name]
    assert codes.nearest is not None
    form = _scaled(0, _searched(fit, codes.nearest))
    return Packing(kind, codes, group, form, parameters, largest)


def _packings() -> list[Packing]:
    two, nibble, five, six, byte = (CODES[name] for name in ("2", "4", "5", "6", "8"))
    half, k, k6, k8 = (PARAMETERS[name] for name in ("float16", "k", "k6", "k8"))
    to_eight, to_sixteen = _scaled(8, _fit_largest), _scaled(16, _fit_largest)
    plain, power = _scaled(0, _fit_magnitude), _scaled(0, _fit_power)
    found = [
        Packing("int4", nibble, 32, to_eight, half, 8),
        Packing("int4-g64", nibble, 64, to_eight, half, 8),
        Packing("q4_1", nibble, 32, _offset(_fit_range), half, 15),
        Packing("q5_0", five, 32, to_sixteen, half, 16),
        Packing("q5_1", five, 32, _offset(_fit_range), half, 31),
        Packing("q8_0", byte, 32, plain, half, 127),
        Packing("q4_k", nibble, 32, _offset(_fit_range_below_zero), k, 15),
        Packing("q5_k", five, 32, _offset(_fit_range_below_zero), k, 31),
        Packing("q6_k", six, 16, _scaled(32, _fit_largest), k6, 32),
        Packing("q2_k", two, 16, _offset(_fit_range_below_zero), PARAMETERS["k2"], 3),
        Packing("q3_k", CODES["3"], 16, _scaled(4, _fit_largest), k6, 4),
        Packing("ternary", two, 64, _scaled(1, _fit_mean), half, 1),
        Packing("ternary-f32", two, 64, _scaled(1, _fit_mean), PARAMETERS["float32"], 1),
        _of_table("iq4_nl", "iq4", 32, half, 127, _fit_largest),
        _of_table("iq4_xs", "iq4", 32, k8, 127, _fit_largest),
        Packing("nf4", CODES["nf4"], 64, plain, PARAMETERS["float32"], 1),
        _of_table("iq3_s", "iq3_s", 32, k8, 15),
        _of_table("iq3_xxs", "iq3_xxs", 32, k8, 15.5),
        _of_table("iq2", "iq2", 16, k6, 5.375),
        _of_table("iq1", "iq1", 16, k6, 1.125),
        _of_table("nvfp4", "e2m1", 16, PARAMETERS["e4m3"], 6),
        Packing("mxfp4", CODES["e2m1"], 32, power, PARAMETERS["e8m0"], 6),
        Packing("fp8", CODES["e4m3"], 64, plain, PARAMETERS["float32"], 448),
        Packing("w8-g64-f16", byte, 64, plain, half, 127),
    ]
    for group in (32, 64):
        found.append(Packing(f"w4z-g{group}-f16", nibble, group, _ZERO, half, 15))
        for name, dtype in (("bf16", "bfloat16"), ("f32", "float32")):
            own = PARAMETERS[dtype]
            found += [
                Packing(f"w4-g{group}-{name}", nibble, group, to_eight, own, 8),
                Packing(f"w4z-g{group}-{name}", nibble, group, _ZERO, own, 15),
                Packing(f"w8-g{group}-{name}", byte, group, plain, own, 127),
            ]
    return found


PACKINGS: dict[str, Packing] = {packing.kind: packing for packing in _packings()}
