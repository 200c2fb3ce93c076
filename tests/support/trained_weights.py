"""A trainer's model with other weights than an engine's, and whether they have arrived there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from support.reference_models import greedy_tokens

from shmllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 300, 17]


def trained(directory: Path) -> Any:
    """A model of transformers with other weights than those in a directory."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(directory).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    """The model's weights by name."""
    return {name: each.detach() for name, each in policy.named_parameters()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def tokens_of(llm: LLM, **options: Any) -> list[int]:
    """The tokens that an engine generates greedily behind PROMPT."""
    output = llm.generate(PROMPT, GREEDY, use_tqdm=False, **options)[0].outputs[0]
    return list(output.token_ids)


def assert_has_weights_of(llm: LLM, policy: Any) -> None:
    """Every weight has the trainer's bits, and the engine generates what the trainer would."""
    for name, tensor in weights_of(policy).items():
        (own,) = llm.collective_rpc("get_weight", args=(name,))
        assert _digest(own) == _digest(tensor), name
    assert tokens_of(llm) == greedy_tokens(policy, PROMPT, GREEDY.max_tokens or 0)
