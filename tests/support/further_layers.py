"""Random models of transformers with layers behind them that predict further tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import reference_model, save
from support.one_thread import one_thread
from torch import Tensor
from transformers.modeling_layers import MtpModel

ROUTER = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = ROUTER | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "glm4_moe": ROUTER | {"head_dim": 16, "first_k_dense_replace": 1, "use_qk_norm": True},
}


def make(family: str, count: int = 1, **options: Any) -> tuple[Any, Any]:
    """A random model of transformers, and layers behind it."""
    options |= FAMILIES[family] | {"num_hidden_layers": 2, "num_nextn_predict_layers": count}
    reference = reference_model(family, **options)
    # transformers counts these layers from 0, where other families have dense ones.
    reference.config.first_k_dense_replace = 0
    further = MtpModel(reference, count).eval()
    reference.config.first_k_dense_replace = 1
    with torch.no_grad():
        for name, parameter in further.layers.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.05)
        for name, buffer in further.layers.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return reference, further


def save_both(reference: Any, further: Any, directory: Path) -> Path:
    """Writes the names of DeepSeek's files, the copies of table and head included."""
    save(reference, directory)
    path = directory / "model.safetensors"
    stored = load_file(path)
    for name, tensor in further.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if rest.startswith("post_attention"):
            rest = rest.replace("shared_head.norm.", "post_norm.")
        stored[f"model.layers.{int(number) + 2}.{rest}"] = tensor.contiguous()
    for layer in range(2, 2 + len(further.layers)):
        copies = {"embed_tokens.weight": "model.embed_tokens.weight"}
        copies["shared_head.head.weight"] = "lm_head.weight"
        for copy, name in copies.items():
            stored[f"model.layers.{layer}.{copy}"] = stored[name].clone()
    save_file(stored, path)
    return directory


@one_thread()
@torch.inference_mode()
def reference_further_logits(reference: Any, further: Any, token_ids: list[int]) -> Tensor:
    """What transformers computes for all but the first token."""
    hidden = reference.model(torch.tensor([token_ids])).last_hidden_state
    positions = torch.arange(1, len(token_ids))[None]
    following = torch.tensor([token_ids[1:]])
    out = further.forward_layer(0, hidden[:, :-1], positions, None, input_ids=following)
    logits: Tensor = reference.lm_head(out)[0]
    return logits
