"""The tests of adapters in a whole engine, whatever number of processes computes the model.

Each file has two fixtures: `adapted`, a model with adapters, and `llm`, an engine of it.
"""

from __future__ import annotations

from pathlib import Path

from support import lora_adapters, lora_experts
from support.adapted_models import WHICH, Adapted, as_prompts, ask, sampled
from support.determinism import said

from shmllm import LLM, LoRARequest


class AdaptersConformance:
    """What no adapter may change."""

    def test_requests_without_an_adapter_have_the_base_s_bits(
        self, adapted: Adapted, llm: LLM
    ) -> None:
        bases = [index for index in WHICH if adapted.mixed()[index] is None]
        with adapted.engine(enable_lora=False) as plain:
            expected = ask(plain, adapted, bases)
        found = ask(llm, adapted, WHICH)
        assert [found[index] for index in bases] == expected

    def test_a_b_of_zeros_has_the_base_s_bits(
        self, adapted: Adapted, llm: LLM, tmp_path: Path
    ) -> None:
        tensors = {
            name: tensor * 0 if "lora_B" in name else tensor
            for name, tensor in adapted.tensors[0].items()
        }
        parameters = lora_experts.PARAMETERS
        path = lora_adapters.write(tmp_path / "zeros", tensors, r=1, target_parameters=parameters)
        prompts, params = as_prompts(adapted.prompts[:6]), sampled(1)
        base = llm.generate(prompts, params, use_tqdm=False)
        zeros = LoRARequest("zeros", 100, str(path))
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=zeros)
        assert [said(output) for output in found] == [said(output) for output in base]
        assert llm.remove_lora(100)
