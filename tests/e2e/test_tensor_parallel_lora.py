"""Adapters in engines with several ranks: the merged models' tokens, the logits of one process but
for rounding, and bits that no other request changes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.adapters import AdaptersConformance
from support import lora_adapters, lora_experts
from support.adapted_models import (
    GREEDY,
    WHICH,
    Adapted,
    alone,
    as_prompts,
    ask,
    sampled,
    tokens_of,
)
from support.determinism import said
from support.engines import assert_idle
from support.reference_models import make_model
from support.scoring import SCORED, scores_of
from support.variants import slow
from support.waiting import join_all

from shmllm import LLM, LoRARequest, RequestError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

RANKS: dict[str, Any] = {
    "multiprocess": False,
    "tensor_parallel_size": 2,
    "kv_cache_memory_bytes": 2**26,
}
MORE = "gpt2", "phi3", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"


def logits_of(llm: LLM, adapted: Adapted, loras: Any) -> list[list[float]]:
    prompts = as_prompts(adapted.prompts)
    outputs = llm.generate(prompts, SCORED, use_tqdm=False, lora_request=loras)
    return [scores_of(output) for output in outputs]


@pytest.mark.parametrize(
    ("kind", "size"),
    [("mixtral", 2), slow("llama", 2), slow("llama", 4), *(slow(kind, 2) for kind in MORE)],
)
def test_ranks_compute_what_one_process_computes(kind: str, size: int, tmp_path: Path) -> None:
    """Four ranks share two key-value heads."""
    adapted = Adapted(kind, tmp_path, logprobs_mode="raw_logits", num_threads=size)
    mixed = adapted.mixed()
    with adapted.engine(tensor_parallel_size=size) as llm:
        prompts = as_prompts(adapted.prompts)
        found = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=mixed))
        logits = logits_of(llm, adapted, mixed)
    adapted.assert_merged(found)
    with adapted.engine() as llm:
        expected, base = logits_of(llm, adapted, mixed), logits_of(llm, adapted, None)
    for ours, theirs, plain, lora in zip(logits, expected, base, mixed, strict=True):
        largest = max(map(abs, theirs), default=0)
        assert ours == pytest.approx(theirs, abs=1e-4 * largest, rel=0)
        if lora is not None and len(theirs) > 1:
            assert theirs != pytest.approx(plain, abs=1e-2 * largest, rel=0)


PEFT: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": "all-linear"},
    "mixtral": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
    },
    "gpt2": {"target_modules": "all-linear"},
}


@pytest.mark.filterwarnings("ignore")  # PEFT's about transformers
@pytest.mark.parametrize("kind", PEFT)
def test_ranks_compute_what_peft_merges(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_model(kind, tmp_path / "model")
    model = peft.get_peft_model(base, peft.LoraConfig(r=5, lora_alpha=7, **PEFT[kind]))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    lora = LoRARequest("one", 1, str(tmp_path / "adapter"))
    merged, prompt = model.merge_and_unload().eval(), list(range(40, 100))
    with torch.inference_mode():
        logits = merged(torch.tensor([prompt])).logits[0]
    expected = [float(row[token]) for row, token in zip(logits, prompt[1:], strict=False)]
    options = {"enable_lora": True, "logprobs_mode": "raw_logits", "dtype": "float32"}
    with LLM(str(tmp_path / "model"), **RANKS, **options) as llm:
        (found,) = llm.generate(as_prompts([prompt]), SCORED, use_tqdm=False, lora_request=lora)
        (plain,) = llm.generate(as_prompts([prompt]), SCORED, use_tqdm=False)
    largest = float(logits.abs().max())
    assert scores_of(found) == pytest.approx(expected, abs=1e-4 * largest, rel=0)
    assert scores_of(plain) != pytest.approx(expected, abs=1e-2 * largest, rel=0)


@pytest.fixture(scope="module", params=["mixtral", slow("qwen3")])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    path = tmp_path_factory.mktemp("adapted")
    return Adapted(request.param, path, tensor_parallel_size=2, num_threads=2)


@pytest.fixture(scope="module")
def shared_engine(adapted: Adapted) -> Iterator[LLM]:
    with adapted.engine() as llm:
        yield llm


@pytest.fixture
def llm(shared_engine: LLM) -> Iterator[LLM]:
    yield shared_engine
    assert_idle(shared_engine)


class TestAdapters(AdaptersConformance):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"max_num_batched_tokens": 23, "enable_prefix_caching": False}),
        slow({"async_scheduling": True, "max_loras": 2, "max_cpu_loras": 3}),
        slow(
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}
        ),
        slow({"dtype": "bfloat16"}),
        slow(
            {"num_gpu_blocks_override": 14, "max_num_seqs": 16, "scheduler_reserve_full_isl": False}
        ),
        slow({"num_threads": 4}),
    ],
    ids=str,
)
def test_a_request_has_the_bits_that_it_has_alone(
    options: dict[str, Any], adapted: Adapted, llm: LLM
) -> None:
    if "dtype" in options:
        with adapted.engine(**options) as other:
            expected = alone(other, adapted, WHICH)
    else:
        expected = alone(llm, adapted, WHICH)
    with adapted.engine(**options) as other:
        assert ask(other, adapted, WHICH) == expected
        assert ask(other, adapted, WHICH[::-1])[::-1] == expected


@pytest.mark.parametrize("what", ["an adapter", "a step"])
def test_ranks_do_one_thing_at_a_time(what: str, adapted: Adapted, llm: LLM) -> None:
    """With async_scheduling adapters are read while a step runs on another thread."""
    memory = llm._client._core.runner._ranks.memory  # type: ignore[attr-defined]
    lora = LoRARequest("other", 102, adapted.loras[3].lora_path)
    acts: dict[str, Callable[[], Any]] = {
        "an adapter": lambda: llm.add_lora(lora),
        "a step": lambda: ask(llm, adapted, [0]),
    }
    other = threading.Thread(target=acts[what])
    with memory.turn:
        step = int(memory.step[0])
        other.start()
        other.join(0.3)
        assert int(memory.step[0]) == step
    join_all([other])
    assert int(memory.step[0]) > step
    llm.remove_lora(102)


def test_a_reload_under_the_same_number_reaches_all_ranks(
    adapted: Adapted, llm: LLM, tmp_path: Path
) -> None:
    prompts = as_prompts(adapted.prompts[:9])

    def generate(lora: LoRARequest) -> list[Any]:
        outputs = llm.generate(prompts, sampled(2), use_tqdm=False, lora_request=lora)
        return [said(output) for output in outputs]

    def write(number: int) -> Path:
        fields: dict[str, Any] = {"r": number, "lora_alpha": 2 * number}
        if number % 2:  # its experts are parameters
            fields["target_parameters"] = lora_experts.PARAMETERS
        return lora_adapters.write(tmp_path / "one", adapted.tensors[number - 1], **fields)

    path = str(write(4))
    lora = LoRARequest("changing", 101, path)
    first = generate(lora)
    assert first == generate(adapted.loras[3])
    for number in (6, 5):
        write(number)
        assert llm.add_lora(LoRARequest("changing", 101, path, load_inplace=True))
        assert generate(lora) == generate(adapted.loras[number - 1]) != first
    assert llm.remove_lora(101)


def count_adapters(worker: Any) -> int:
    """The number of adapters in the memory of a rank."""
    from shmllm.worker.cpu.lora import CpuAdapter

    gc.collect()
    return sum(isinstance(each, CpuAdapter) for each in gc.get_objects())


def test_all_ranks_free_what_one_frees(adapted: Adapted, tmp_path: Path) -> None:
    bad = lora_adapters.write(tmp_path / "bad", adapted.tensors[3], r=5)
    with adapted.engine(multiprocess=True, max_loras=2, max_cpu_loras=3) as llm:
        ask(llm, adapted, [0])
        assert llm.collective_rpc(count_adapters) == [0, 0]
        ask(llm, adapted, WHICH)
        ask(llm, adapted, [0])
        assert llm.collective_rpc(count_adapters) == [3, 3]
        with pytest.raises(RequestError, match="has shape"):
            llm.add_lora(LoRARequest("bad", 200, str(bad)))
        for number in llm.list_loras():
            llm.remove_lora(number)
        expected = ask(llm, adapted, [0])
        assert llm.collective_rpc(count_adapters) == [0, 0]
        config = {"r": 4, "lora_alpha": 8}
        lora = LoRARequest("sent", 300)
        llm.add_lora(lora, tensors=adapted.tensors[3], config=config)
        assert llm.collective_rpc(count_adapters) == [1, 1]
        llm.sleep(1)
        llm.wake_up()
        prompts = as_prompts(adapted.prompts[:6])
        found = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora))
        of_file = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapted.loras[3])
        assert found == tokens_of(of_file)
        assert ask(llm, adapted, [0]) == expected
