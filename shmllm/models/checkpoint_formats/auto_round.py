"""auto-round: the tensors of GPTQ or AWQ, which ``packing_format`` names."""

from __future__ import annotations

from shmllm.models.checkpoint_formats import awq, gptq
from shmllm.models.checkpoint_formats.components import Method
from shmllm.models.fields import Fields

PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptq", "auto_round:awq")
_UNROUNDED_BITS = 16


def configure(fields: Fields) -> Method:
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    if packing not in PACKINGS:
        raise fields.error(
            f"packing_format {packing!r} is not supported; supported: {', '.join(PACKINGS)}"
        )
    bits = fields.integer("bits")
    for name, options in fields.table("extra_config").items():
        own = options.get("bits", bits) if isinstance(options, dict) else bits
        if own != bits and not (type(own) is int and own >= _UNROUNDED_BITS):
            raise fields.error(f"extra_config: other options for {name!r} are not supported")
    if packing.endswith("awq"):
        return awq.configure(Fields(fields.values | {"zero_point": True}, fields.where))
    return gptq.configure(Fields(fields.values | {"desc_act": False}, fields.where))
