"""Models on disk with adapters that change all that adapters can, and what engines say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import lora_adapters, lora_experts
from support.determinism import said
from support.reference_models import make_model, make_prompts
from support.scoring import choices

from shmllm import LLM, LoRARequest, SamplingParams

NUM_ADAPTERS = 8
MAX_TOKENS = 12
FUSED = ("qkv_proj", "gate_up_proj", "c_attn", "c_fc", "c_proj")
"""Those of Phi-3, and of GPT-2."""
WHICH = list(range(18))
"""Prompts whose adapters are each of them, and none, twice."""
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


class Adapted:
    """A model on disk, its adapters, and an engine with room for some of them."""

    def __init__(self, kind: str, directory: Path, **options: Any) -> None:
        self.model = make_model(kind, directory / "model")
        shapes = lora_adapters.linear_modules(self.model)
        names = (*lora_adapters.PROJECTIONS, *FUSED, "shared_expert_gate")
        self.shapes = lora_adapters.with_suffixes(shapes, names)
        self.modules, self.changes, self.tensors, self.loras = [], [], [], []
        for number in range(1, NUM_ADAPTERS + 1):
            self.modules.append(lora_adapters.draw(self.shapes, number, number, 1.2))
            is_separate = number % 2 == 0 and kind in lora_experts.SEPARATE
            draw = lora_experts.separate if is_separate else lora_experts.fused
            of_experts, changes = draw(self.model, number, number, 1.2)
            self.changes.append(changes)
            self.tensors.append(self.modules[-1] | of_experts)
            path = directory / f"adapter-{number}"
            fields = {"r": number, "lora_alpha": 2 * number}
            parameters = lora_experts.PARAMETERS if of_experts else None
            lora_adapters.write(path, self.tensors[-1], **fields, target_parameters=parameters)
            self.loras.append(LoRARequest(path.name, number, str(path)))
        self.prompts = make_prompts(self.model.config.vocab_size, 90)
        self.directory = directory / "model"
        self.options: dict[str, Any] = {
            "kv_cache_memory_bytes": 2**26,
            "multiprocess": False,
            "dtype": "float32",
            "enable_lora": True,
            "max_loras": NUM_ADAPTERS,
        } | options

    def engine(self, **options: Any) -> LLM:
        return LLM(str(self.directory), **(self.options | options))

    def merged(self) -> dict[LoRARequest | None, Any]:
        """The model with each adapter's changes, and without any."""
        found: dict[LoRARequest | None, Any] = {None: self.model}
        for lora, modules, changes in zip(self.loras, self.modules, self.changes, strict=True):
            model = lora_adapters.merged(self.model, modules, 2.0)
            found[lora] = lora_experts.merged(model, changes, 2.0)
        return found

    def assert_merged(self, continuations: list[list[int]]) -> None:
        """Checks greedy tokens of all prompts, which were given the adapters of `mixed`."""
        merged = self.merged()
        for prompt, lora, tokens in zip(self.prompts, self.mixed(), continuations, strict=True):
            assert choices(merged[lora], prompt, tokens) == tokens

    def mixed(self) -> list[LoRARequest | None]:
        """An adapter for each prompt: each of them, and none, in turn."""
        every = [None, *self.loras]
        return [every[index % len(every)] for index in range(len(self.prompts))]


def as_prompts(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def sampled(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=[0, 0.9][number % 2],
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        seed=number,
        logprobs=2,
        prompt_logprobs=1 if number % 3 == 0 else None,
    )


def ask(llm: LLM, adapted: Adapted, which: list[int]) -> list[Any]:
    mixed = adapted.mixed()
    outputs = llm.generate(
        as_prompts([adapted.prompts[index] for index in which]),
        [sampled(index) for index in which],
        use_tqdm=False,
        lora_request=[mixed[index] for index in which],
    )
    return [said(output) for output in outputs]


def alone(llm: LLM, adapted: Adapted, which: list[int]) -> list[Any]:
    return [ask(llm, adapted, [index])[0] for index in which]
