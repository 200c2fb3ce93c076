"""Reads the fields of config.json that families with Mamba 1 or 2 share. It must not import torch:
front ends import it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shmllm.models.fields import Fields
from shmllm.models.readers import read_activation
from shmllm.models.recurrent_specs import Mamba2Spec, MambaNorms, MambaSpec

LINEAR = "linear_attention"
"""The type of layers with a recurrent state, as in the field ``layer_types``."""
CHANNEL_MULTIPLE = 16
"""What the number of channels, and the width of a head of Mamba 2, must be multiples of."""
MOST_TAPS = 4
"""The most tokens that a convolution reads."""
MOST_STATE = 128
"""The largest state_size of Mamba 1."""
UNLIMITED_POSITIONS = 131_072
"""The longest request of a model that knows no positions."""

Names = Mapping[str, tuple[str, Any]]
"""A family's name and default for each field."""

HYBRID_MAMBA2: Names = {
    "heads": ("mamba_n_heads", 128),
    "head_dim": ("mamba_d_head", "auto"),
    "groups": ("mamba_n_groups", 1),
    "state_size": ("mamba_d_state", 256),
    "taps": ("mamba_d_conv", 4),
    "bias": ("mamba_proj_bias", False),
    "convolution_bias": ("mamba_conv_bias", True),
    "expand": ("mamba_expand", 2),
    "activation": ("hidden_act", "silu"),
}
"""The names of Bamba and of Granite."""


def read_mamba2(fields: Fields, names: Names) -> Mamba2Spec:
    """Returns a Mamba 2.

    Args:
        fields: the fields of config.json.
        names: the fields of `Mamba2Spec`, "activation", and "expand" if the width of all heads must
            be that multiple of the hidden size, unless there is a field "width" that is not null.
            The default of head_dim may be "auto": it follows from that. A field "output_bias" that
            is missing is that of "bias".
    """
    _check_activation(fields, *names["activation"])
    heads = fields.integer(*names["heads"])
    spec = Mamba2Spec(
        heads=heads,
        head_dim=_head_dim(fields, names, heads),
        groups=fields.integer(*names["groups"]),
        state_size=fields.integer(*names["state_size"]),
        taps=_taps(fields, *names["taps"]),
        bias=fields.flag(*names["bias"]),
        output_bias=fields.flag(*names.get("output_bias", names["bias"])),
        convolution_bias=fields.flag(*names["convolution_bias"]),
        limits=_limits(fields),
    )
    _check_widths(fields, names, spec)
    return spec


def read_mamba(
    fields: Fields, names: Names, norms: MambaNorms | None, norm_eps: float
) -> MambaSpec:
    """Returns a Mamba.

    Args:
        fields: the fields of config.json.
        names: the fields of `MambaSpec`, "activation", and "expand", the width as a multiple of the
            hidden size, which counts if there is no field "width".
        norms, norm_eps: see `MambaSpec`.
    """
    _check_activation(fields, *names["activation"])
    hidden_size = fields.integer("hidden_size")
    rank_name, rank = names["rank"][0], -(-hidden_size // 16)
    if fields.values.get(rank_name) != "auto":
        rank = fields.integer(rank_name, rank, maximum=hidden_size)
    width = hidden_size * fields.integer(*names["expand"])
    if "width" in names:
        width = fields.integer(names["width"][0], width)
    if width % CHANNEL_MULTIPLE:
        raise fields.error(f"the width ({width}) must be a multiple of {CHANNEL_MULTIPLE}")
    state_name, default = names["state_size"]
    return MambaSpec(
        width=width,
        state_size=fields.integer(state_name, default, maximum=MOST_STATE),
        rank=rank,
        taps=_taps(fields, *names["taps"]),
        bias=fields.flag(*names["bias"]),
        convolution_bias=fields.flag(*names["convolution_bias"]),
        norms=norms,
        norm_eps=norm_eps,
    )


def _check_activation(fields: Fields, name: str, default: str) -> None:
    if (activation := read_activation(fields, name, default)) != "silu":
        raise fields.error(f"Mamba with {name} {activation!r} is not supported, only silu")


def _head_dim(fields: Fields, names: Names, heads: int) -> int:
    name, default = names["head_dim"]
    found = fields.values.get(name)
    if (default if found is None else found) != "auto":
        return fields.integer(name, default)
    what, width = _width(fields, names)
    if width % heads:
        raise fields.error(f"{names['heads'][0]} ({heads}) must divide {what} ({width})")
    return width // heads


def _width(fields: Fields, names: Names) -> tuple[str, int]:
    """Returns what the width of all heads must be, in words, and that width."""
    name, default = names.get("width", ("", None))
    if fields.values.get(name, default) is not None:
        return name, fields.integer(name, default)
    width = fields.integer(*names["expand"]) * fields.integer("hidden_size")
    return f"{names['expand'][0]} * hidden_size", width


def _taps(fields: Fields, name: str, default: int) -> int:
    return fields.integer(name, default, minimum=2, maximum=MOST_TAPS)


def _limits(fields: Fields) -> tuple[float, float]:
    """Returns ``time_step_limit``. Infinity may be an object, as transformers writes it."""
    found: Any = fields.values.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    limits = [_infinity(each) for each in found] if isinstance(found, list) else []
    if (
        len(limits) != 2
        or any(type(each) not in (int, float) for each in limits)
        or not 0 <= limits[0] <= limits[1]
    ):
        raise fields.error(f"'time_step_limit' must be two ascending numbers, not {found!r}")
    return float(limits[0]), float(limits[1])


def _infinity(value: Any) -> Any:
    return math.inf if value == {"__float__": "Infinity"} else value


def _check_widths(fields: Fields, names: Names, spec: Mamba2Spec) -> None:
    if spec.head_dim % CHANNEL_MULTIPLE:
        raise fields.error(
            f"{names['head_dim'][0]} must be a multiple of {CHANNEL_MULTIPLE}, not {spec.head_dim}"
        )
    if spec.heads % spec.groups:
        raise fields.error(
            f"{names['heads'][0]} ({spec.heads}) must be a multiple of "
            f"{names['groups'][0]} ({spec.groups})"
        )
    if spec.convolved_width % CHANNEL_MULTIPLE:
        raise fields.error(
            f"{names['groups'][0]} * {names['state_size'][0]} must be a multiple of "
            f"{CHANNEL_MULTIPLE // 2}, not {spec.groups * spec.state_size}"
        )
    if "expand" not in names:
        return
    what, width = _width(fields, names)
    if width != spec.width:
        raise fields.error(
            f"{what} ({width}) must be {names['heads'][0]} * {names['head_dim'][0]} ({spec.width})"
        )
