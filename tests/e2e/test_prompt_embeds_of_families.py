"""Prompts given as embeddings equal transformers' in families that change what a table returns: a
factor of the tokens' embeddings (Gemma), of all embeddings (Granite), learned positions (GPT-2), or
inputs that each layer has of its own (Gemma 3n and 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_leaks")

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 16},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "granite_moe_hybrid": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "mamba_n_heads": 6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "gpt2": {},
    "gemma3n": {
        "head_dim": 16,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 90,
        "hidden_size_per_layer_input": 24,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4": {
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 24,
        "layer_types": ["full_attention"] * 3,
    },
}
KINDS = ["gemma3", "granite", "gpt2", "gemma4"]
KINDS += map(slow, ("gemma3n", "granite_moe_hybrid", "mamba2"))
NUM_TOKENS = 8


@torch.inference_mode()
def greedy(model: Any, embeds: torch.Tensor) -> list[int]:
    """Transformers' tokens after these embeddings, [tokens, hidden], without its cache."""
    found: list[int] = []
    prompt = [model.config.pad_token_id] * len(embeds)  # as for what an image's tower gives
    for _ in range(NUM_TOKENS):
        inputs = {"inputs_embeds": embeds[None]}
        if getattr(model.config, "hidden_size_per_layer_input", 0):
            of_layers = model.model.get_per_layer_inputs(torch.tensor([prompt + found]))
            inputs["per_layer_inputs"] = of_layers
        token = int(model(**inputs).logits[0, -1].argmax())
        found.append(token)
        embeds = torch.cat((embeds, model.get_input_embeddings()(torch.tensor([token]))))
    return found


@pytest.mark.parametrize("family", KINDS)
def test_given_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    model = reference_model(family, 4.0, **FAMILIES[family])
    directory = save(model, tmp_path / "model")
    torch.manual_seed(3)
    prompts = [torch.randn(length, model.config.hidden_size) for length in (1, 9, 40)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, "max_model_len": 64}
    with LLM(str(directory), multiprocess=False, enable_prompt_embeds=True, **options) as llm:
        outputs = llm.generate(
            [{"prompt_embeds": prompt} for prompt in prompts], params, use_tqdm=False
        )
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.outputs[0].token_ids) == greedy(model, prompt)
