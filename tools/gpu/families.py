"""The sizes of measured models of other families than `shapes`, and the bytes of their decodes.

Their decodes of a few requests have launches that Llama's have not: those of mixtures of experts,
of latent attention, and of layers with a recurrent state. It imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.shapes import write_model


@dataclass(frozen=True)
class Family:
    """A model of another family, most of which have a mixture of experts in most layers.

    Attributes:
        name: its name in tables.
        fields: its config.json, but for the dtype and what `write` adds.
        small: the fields that a rehearsal replaces.
        num_parameters: the number of its parameters.
        num_kinds: how many of the first layers are of all kinds that there are.
        expert_layers: the number of layers with a mixture.
        kv_elements: the elements that the cache keeps of a token, in all layers.
        state_bytes: the bytes of the recurrent states of a request, in all layers.
    """

    name: str
    fields: Mapping[str, Any]
    small: Mapping[str, Any]
    num_parameters: int
    num_kinds: int
    expert_layers: int
    kv_elements: int
    state_bytes: int = 0

    def decode_bytes(self, batch: int, context: float, itemsize: int) -> float:
        """Returns the bytes that a decode step must at least read and write, as
        `Shape.decode_bytes` does: of the experts those that are chosen, were each choice of a token
        as likely as any other; of recurrent states twice their bytes.

        Args:
            batch: the number of requests.
            context: the number of tokens that each request attends to, its own included.
            itemsize: the bytes of one element.
        """
        weights: float = self.num_parameters - self._unchosen(batch)
        weights -= self.fields["vocab_size"] * self.fields["hidden_size"]  # the table of embeddings
        states = 2 * batch * self.state_bytes
        return (weights + batch * context * self.kv_elements) * itemsize + states

    def _unchosen(self, batch: int) -> float:
        """Returns the number of parameters of experts that no request chooses."""
        if self.expert_layers == 0:
            return 0.0
        fields = self.fields
        experts: float = fields.get("num_experts") or fields["n_routed_experts"]
        an_expert: float = 3 * fields["hidden_size"] * fields["moe_intermediate_size"]
        share: float = fields["num_experts_per_tok"] / experts
        return self.expert_layers * experts * (1 - share) ** batch * an_expert

    def first_layers(self) -> Family:
        """Returns a model of the first layers that are of all kinds."""
        types = self.fields.get("layer_types")
        of_layers = {} if types is None else {"layer_types": types[: self.num_kinds]}
        fewer = {"num_hidden_layers": self.num_kinds, **of_layers}
        return replace(self, fields={**self.fields, **fewer})

    def shrunk(self) -> Family:
        """Returns a model of the same family that is small enough for a CPU."""
        return replace(self, fields={**self.fields, **self.small})

    def write(self, directory: Path, dtype: str) -> Path:
        """Writes a model directory without weights, as `Shape.write` does."""
        common = {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": dtype,
        }
        return write_model(directory, common | dict(self.fields))


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}

FAMILIES = {
    "mixture": Family(
        "Qwen3-30B-A3B",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        _SMALL
        | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16},
        num_parameters=30_532_122_624,
        num_kinds=1,
        expert_layers=48,
        kv_elements=48 * 2 * 4 * 128,
    ),
    "latent": Family(
        "DeepSeek-V2-Lite",
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "vocab_size": 102_400,
            "max_position_embeddings": 163_840,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        _SMALL
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 16,
        },
        num_parameters=15_706_484_224,
        num_kinds=2,
        expert_layers=26,
        kv_elements=27 * (512 + 64),
    ),
    "recurrent": Family(
        "Qwen3-Next-80B-A3B, 12 of its 48 layers",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 12,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "vocab_size": 151_936,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        _SMALL
        | {
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 16,
        },
        num_parameters=20_385_346_752,
        num_kinds=4,
        expert_layers=12,
        kv_elements=3 * 2 * 2 * 256,
        state_bytes=9 * 4 * (32 * 128 * 128 + 3 * 8192),
    ),
    "mamba": Family(
        "Falcon-Mamba-7B",
        {
            "architectures": ["FalconMambaForCausalLM"],
            "model_type": "falcon_mamba",
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 64,
            "state_size": 16,
            "time_step_rank": 256,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 65_024,
            "layer_norm_epsilon": 1e-5,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "time_step_rank": 8,
            "vocab_size": 4096,
        },
        num_parameters=7_272_665_088,
        num_kinds=1,
        expert_layers=0,
        kv_elements=0,
        state_bytes=64 * 4 * (16 + 3) * 8192,
    ),
}
