"""The tests of adapters in a whole engine on a device, compared with merged models of transformers.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_engine import SCALE, SHAPE, Engine, expected, make_config
from support import lora_adapters, lora_experts
from support.model_helpers import reference_model, save
from support.variants import slow
from transformers import PreTrainedModel

from shmllm.config.engine import EngineConfig
from shmllm.config.lora import LoraConfig
from shmllm.errors import EngineStartError
from shmllm.params.lora import LoRARequest
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.worker.gpu.device import Device

RANKS = (3, 8, 5)
ADAPTERS = [0, 1, None, 2, 1]
"""The adapter of each request; None: it has none."""
LENGTHS = (9, 3, 5, 1, 2)
PROMPTS = [[(7 * n + 3 * i) % 90 + 1 for i in range(size)] for n, size in enumerate(LENGTHS)]
COUNT = 4
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
}
OF_LATENTS = {
    "layers_block_type": ["moe", "full_attention", "moe"],
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_latent_size": 20,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
}


def routers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The [experts, hidden] of the routers, by name."""
    names = "mlp.gate", "mixer.gate"
    found = ((name, module) for name, module in model.named_modules() if name.endswith(names))
    return {name: tuple(module.weight.shape) for name, module in found}


class Adapted:
    """A model on disk, its adapters, and what transformers says of the merged models, with the
    chosen modules or all."""

    def __init__(
        self,
        directory: Path,
        family: str = "llama",
        chosen: tuple[str, ...] | None = None,
        **options: Any,
    ) -> None:
        self.chosen = chosen
        reference = reference_model(family, SCALE, **(SHAPE | options))
        self.directory = save(reference, directory / "model")
        modules = lora_adapters.linear_modules(reference)
        names = (*lora_adapters.PROJECTIONS, "shared_expert_gate", "latent_proj")
        shapes = lora_adapters.with_suffixes(modules, names) | routers(reference)
        self.loras, merged = [], [reference]
        for index, rank in enumerate(RANKS):
            tensors = lora_adapters.draw(shapes, index, rank, 1.5)
            draw = lora_experts.separate if index == 1 else lora_experts.fused
            of_experts, changes = draw(reference, index, rank, 1.5)
            path = directory / str(index)
            fields = {"r": rank, "lora_alpha": 2 * rank}
            parameters = lora_experts.PARAMETERS if of_experts else None
            lora_adapters.write(path, tensors | of_experts, **fields, target_parameters=parameters)
            self.loras.append(LoRARequest(str(index), index + 1, str(path)))
            if chosen is not None:
                tensors = {n: t for n, t in tensors.items() if n.split(".")[-3] in chosen}
                changes = changes if "experts" in chosen else {}
            model = lora_adapters.merged(reference, tensors, 2.0)
            merged.append(lora_experts.merged(model, changes, 2.0))
        self.wanted = [
            expected(merged[0 if adapter is None else adapter + 1], prompt, COUNT)
            for adapter, prompt in zip(ADAPTERS, PROMPTS, strict=True)
        ]
        base = [expected(reference, prompt, COUNT) for prompt in PROMPTS]
        assert sum(a != b for a, b in zip(base, self.wanted, strict=True)) >= 3

    def config(self, max_loras: int, **options: Any) -> EngineConfig:
        lora = LoraConfig(enable_lora=True, max_loras=max_loras, max_lora_rank=8)
        lora = replace(lora, target_modules=self.chosen)
        return replace(make_config(self.directory, **options), lora=lora)

    def add(self, engine: Engine, index: int) -> None:
        adapter = ADAPTERS[index]
        request = EngineCoreRequest(
            index,
            PROMPTS[index],
            SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
            lora=None if adapter is None else self.loras[adapter],
        )
        refusal = engine.core.add(0, request)
        assert refusal is None, refusal


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module", params=[("qwen2_moe", EXPERTS), ("nemotron_3", OF_LATENTS)])
def adapted_experts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    family, sizes = request.param
    return Adapted(tmp_path_factory.mktemp("experts"), family, **sizes)


class LoraEngineConformance:
    @pytest.mark.parametrize(
        ("mode", "max_loras"),
        [
            ("FULL_AND_PIECEWISE", 2),
            *(slow(*each) for each in (("NONE", 3), ("PIECEWISE", 3), ("FULL", 1))),
        ],
    )
    def test_greedy_tokens_are_those_of_the_merged_models(
        self, adapted: Adapted, gpu_device: Device, mode: str, max_loras: int
    ) -> None:
        """With fewer places than adapters, a place is overwritten while graphs stay captured."""
        engine = Engine(adapted.config(max_loras, mode=mode), gpu_device)
        for index in range(len(PROMPTS)):
            adapted.add(engine, index)
        engine.run()
        assert [engine.tokens[index] for index in range(len(PROMPTS))] == adapted.wanted

    @pytest.mark.parametrize(
        ("mode", "max_loras"), [slow("FULL_AND_PIECEWISE", 2), slow("NONE", 3), slow("FULL", 1)]
    )
    def test_experts_and_routers_have_adapters(
        self, adapted_experts: Adapted, gpu_device: Device, mode: str, max_loras: int
    ) -> None:
        engine = Engine(adapted_experts.config(max_loras, mode=mode), gpu_device)
        for index in range(len(PROMPTS)):
            adapted_experts.add(engine, index)
        engine.run()
        found = [engine.tokens[index] for index in range(len(PROMPTS))]
        assert found == adapted_experts.wanted

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("family", "sizes", "chosen"),
        [
            ("llama", {}, ("v_proj", "up_proj")),
            ("qwen2_moe", EXPERTS, ("experts",)),
            ("qwen2_moe", EXPERTS, ("q_proj", "o_proj", "gate")),
        ],
    )
    def test_adapters_change_chosen_modules_only(
        self,
        family: str,
        sizes: dict[str, Any],
        chosen: tuple[str, ...],
        gpu_device: Device,
        tmp_path: Path,
    ) -> None:
        adapted = Adapted(tmp_path, family, chosen, **sizes)
        self.test_greedy_tokens_are_those_of_the_merged_models(adapted, gpu_device, "FULL", 2)

    @pytest.mark.slow
    def test_contents_are_replaced(self, adapted: Adapted, gpu_device: Device) -> None:
        engine = Engine(adapted.config(1, mode="NONE"), gpu_device)
        adapted.add(engine, 0)
        engine.run()
        other = LoRARequest("0", 1, adapted.loras[1].lora_path, load_inplace=True)
        engine.core.settle()
        assert engine.core.adapters.add(other)
        request = EngineCoreRequest(
            9,
            PROMPTS[1],
            SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
            lora=LoRARequest("0", 1),
        )
        refusal = engine.core.add(0, request)
        assert refusal is None, refusal
        engine.run()
        assert engine.tokens[0] == adapted.wanted[0]
        assert engine.tokens[9] == adapted.wanted[1]

    def test_another_dtype_than_the_model_s_is_refused(
        self, adapted: Adapted, gpu_device: Device
    ) -> None:
        lora = LoraConfig(enable_lora=True, lora_dtype="float16")
        config = replace(make_config(adapted.directory), lora=lora)
        with pytest.raises(EngineStartError, match="lora_dtype='float16' is for the CPU"):
            Engine(config, gpu_device)
