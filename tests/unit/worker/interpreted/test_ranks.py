"""Two ranks, each with a fake GPU in a process of its own, compute what one computes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.gpu_drafting_models import (
    further,
    latent_config,
    other,
    record_drafts,
    with_further,
    with_model,
)
from conformance.gpu_drafts import MIXED, ScriptedDrafter, draft_with, drafting_config
from conformance.gpu_encoders import encoder_config, encoders, vectors_of
from conformance.gpu_engine import (
    PROMPTS,
    SCALE,
    SHAPE,
    VOCAB,
    Engine,
    assert_same_logprobs,
    check_sleep_and_new_weights,
    expected,
    launches_of_a_step,
    make_config,
    other_model,
    pusher,
)
from conformance.gpu_float8 import assert_logprobs, with_float8
from conformance.gpu_images import ask, make_subject
from conformance.gpu_images import make_config as make_image_config
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from conformance.gpu_ranks import KV_HEADS, compiled_kernels, ended_in_time, fake_ranks, make
from support.fake_gpu import FakeGpu, eager
from support.model_helpers import reference_model, save
from support.rounded_attention import round_keys_and_values
from support.variants import slow
from transformers import BertForSequenceClassification

from shmllm.errors import EngineStartError
from shmllm.parallel.rank_process import RankDeadError
from shmllm.params.pooling import PoolingType
from shmllm.wire.rpc import RpcCall, pickle_call
from shmllm.worker.gpu import group
from shmllm.worker.gpu.part import GpuPart
from shmllm.worker.memory import CacheSize
from shmllm.worker.ranks import NoRanks
from shmllm_kernels.gpu import group as kernels

__all__ = ["compiled_kernels", "encoders", "fake_ranks", "further", "make", "other"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = reference_model("llama", SCALE, **SHAPE | KV_HEADS)
    return made, save(made, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a model of a family."""

    @cache
    def make_family(family: str) -> Path:
        made = reference_model(family, SCALE, **PROGRAM_SHAPE | VARIANTS[family])
        return save(made, tmp_path_factory.mktemp(family))

    return make_family


def ask_everything(engine: Engine) -> None:
    """Requests of all kinds, in steps with chunks of prompts and decodes."""
    config = engine.runner.model.config
    embeds = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(2))
    engine.add(0, PROMPTS[0], logprobs=3, prompt_logprobs=2)
    engine.add(1, PROMPTS[1], temperature=0.9, seed=7, max_tokens=6)
    engine.add(2, PROMPTS[2], repetition_penalty=1.7, temperature=1.1, top_k=9, seed=3)
    if not any(each.reads_ids for each in config.mixtures):
        engine.add(3, [0] * 5, embeds=embeds)
    engine.run()


FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "falcon",
    "cohere2_moe",
    "phi",
    "qwen2_moe",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "hy_v4",
    "deepseek_v4",
    "longcat_flash",
    "gemma3n",
    "gemma4",
    "mamba2",
    "falcon_h1",
    "kimi_linear",
    "bailing_moe_v3",
    "minimax",
    "olmo_hybrid",
    "nemotron_3",
    "zamba2",
)


@pytest.mark.parametrize("family", list(map(slow, FAMILIES)))
def test_two_ranks_equal_one(
    saved: Callable[[str], Path], make: Any, gpu_device: FakeGpu, family: str
) -> None:
    config = make_config(saved(family), budget=16)
    config = replace(config, cache=replace(config.cache, memory_bytes=2**21))
    engines = make(config), Engine(config, gpu_device)
    for engine in engines:
        ask_everything(engine)
    ours, alone = engines
    assert ours.tokens == alone.tokens
    assert alone.logprobs.keys() == {0}
    assert_same_logprobs(ours, alone)
    mine, theirs = (
        np.concatenate([part.logprobs for part in engine.prompt_logprobs[0]]) for engine in engines
    )
    assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
def test_two_ranks_encode_as_one(encoders: Any, make: Any, gpu_device: FakeGpu) -> None:
    _, directory = encoders(BertForSequenceClassification)
    config = encoder_config(directory)
    alone, ours = Engine(config, gpu_device), make(config)
    for options in ({"type": PoolingType.MEAN}, {"type": PoolingType.CLS, "uses_head": True}):
        wanted = vectors_of(alone, normalize=False, **options)
        with ended_in_time(ours):
            found = vectors_of(ours, normalize=False, **options)
        for one, second in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, second, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seeing", ["llava", "gemma3", "qwen3_vl", "qwen3_5", "mistral3"])
def test_the_first_of_two_ranks_sees_images(
    seeing: str, make: Any, gpu_device: FakeGpu, tmp_path: Path
) -> None:
    with gpu_device.bypassed():  # it computes transformers' tokens, too
        subject = make_subject(seeing, tmp_path, num_attention_heads=4, num_key_value_heads=2)
    engine = make(make_image_config(tmp_path))
    with ended_in_time(engine):
        ask(engine, subject, ["one", "text", "two"])
        ask(engine, subject, ["two"])


@pytest.mark.parametrize(
    "mode", ["FULL_AND_PIECEWISE", *map(slow, ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"))]
)
def test_greedy_tokens_equal_those_of_transformers(
    llama: Any, make: Any, gpu_device: FakeGpu, mode: str
) -> None:
    reference, directory = llama
    engine = make(make_config(directory, mode=mode))
    info = engine.runner.info
    assert info.tensor_parallel_size == 2
    assert info.num_parameters == sum(each.numel() for each in reference.parameters())
    for number, prompt in enumerate(PROMPTS):
        engine.add(number, prompt)
    engine.run()
    wanted = [expected(reference, prompt, 4) for prompt in PROMPTS]
    assert [engine.tokens[number] for number in range(len(PROMPTS))] == wanted
    assert ("graph" in gpu_device.launched) == (mode != "NONE")


@pytest.mark.slow
def test_a_decode_step_meets_the_others_once_outside_of_its_graph(
    llama: Any, make: Any, gpu_device: FakeGpu
) -> None:
    engine = make(make_config(llama[1]))
    engine.add(0, [5], temperature=0.7, max_tokens=9)
    engine.add(1, [7], max_tokens=9)
    for _ in range(5):
        engine.step()
    assert launches_of_a_step(engine, gpu_device) == [
        *("copy", "_sum_parts"),
        *("copy ahead", "_unpack_step", "graph"),
        *("graph", "copy"),  # of sampling
    ]
    engine.run()


@pytest.mark.slow
def test_a_step_of_one_token_is_seven_launches_a_layer(
    llama: Any, make: Any, gpu_device: FakeGpu
) -> None:
    """A sum over the ranks is added to the residual stream where it is computed."""
    engine = make(make_config(llama[1], mode="NONE"))
    engine.add(0, [5])
    with ended_in_time(engine):
        engine.step()
        launched = launches_of_a_step(engine, gpu_device)
        product = "multiply_single_row"
        attention = [product, "attend_decodes", product, "_sum_parts"]
        layer = [*attention, product, product, "_sum_parts"]
        first = launched.index("_rope_tables") + 1
        assert launched[first:][: 2 * len(layer)] == 2 * layer
        engine.run()


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_shared_expert_is_in_the_sum_over_the_ranks_of_the_others(
    saved: Callable[[str], Path], make: Any, gpu_device: FakeGpu, num_requests: int
) -> None:
    """So a layer with a mixture has as many sums as one with an MLP, two."""
    engine = make(make_config(saved("qwen2_moe"), mode="NONE"))
    for number in range(num_requests):
        engine.add(number, [5 + number])
    with ended_in_time(engine):
        engine.step()
        launched = launches_of_a_step(engine, gpu_device)
        product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
        attention = [product, "attend_decodes", product, "_sum_parts", "_route_rows"]
        experts = ["multiply_gate_and_up", "multiply_down", "_combine", "_sum_parts"]
        layer = [*attention, *experts]
        first = launched.index("_rope_tables") + 1
        assert launched[first:][: 2 * len(layer)] == 2 * layer
        engine.run()


@pytest.mark.parametrize("large_bytes", [slow(4 * 32 * 4), slow(group.LARGE_BYTES)])
def test_four_ranks_equal_transformers(
    llama: Any,
    make: Any,
    gpu_device: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    large_bytes: int,
) -> None:
    """They share two key-value heads, 97 tokens have no equal parts, and sums of four tokens and
    more are divided: those of 11 into slices of two and of three tokens, which are one block and
    two."""
    for module, name, value in ((group, "LARGE_BYTES", large_bytes), (kernels, "BLOCK", 2 * 32)):
        monkeypatch.setattr(module, name, value)
        monkeypatch.setenv(name, str(value))
    reference, directory = llama
    engine = make(make_config(directory, mode="NONE", budget=16), size=4)
    gpu_device.launched.clear()
    engine.add(0, PROMPTS[0])
    with ended_in_time(engine):
        engine.run()
    assert engine.tokens[0] == expected(reference, PROMPTS[0], 4)
    num_gathers = 4  # of logits
    is_divided = gpu_device.launched.count("_meet") > num_gathers
    assert is_divided == (large_bytes == 4 * 32 * 4)


@pytest.mark.slow
def test_other_requests_do_not_change_a_requests_tokens(llama: Any, make: Any) -> None:
    """Preemption, an abort and a prefix-cache hit, while steps overlap."""
    reference, directory = llama
    prompts = {0: [5] * 9, 1: [9, 8, 7, 6], 2: [11] * 7, 3: [5] * 9 + [4]}
    engine = make(make_config(directory, num_blocks=5, num_seqs=3))
    assert engine.runner.max_in_flight == 2
    for number in range(3):
        engine.add(number, prompts[number], max_tokens=8)
    for _ in range(4):
        engine.step()
    engine.core.abort(0, [2])
    engine.add(3, prompts[3], max_tokens=5)
    engine.run()
    for number, count in ((0, 8), (1, 8), (3, 5)):
        assert engine.tokens[number] == expected(reference, prompts[number], count)
    assert engine.core.scheduler.stats.prefix_hit_tokens > 0


@pytest.mark.slow
def test_graphs_work_after_sleep_and_with_new_weights(llama: Any, make: Any) -> None:
    reference, directory = llama
    engine, other = make(make_config(directory, num_seqs=2)), other_model(**KV_HEADS)
    check_sleep_and_new_weights(engine, reference, other)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(engine.runner.read_weight(name), other.state_dict()[name])


@pytest.mark.slow
def test_new_weights_come_through_memory_of_the_first_gpu(
    llama: Any, make: Any, gpu_device: FakeGpu
) -> None:
    reference, directory = llama
    engine, other = make(make_config(directory, num_seqs=2)), other_model(**KV_HEADS)
    where = gpu_device.torch_device
    weights = {name: each.detach().to(where) for name, each in other.named_parameters()}
    updated = pusher(engine, gpu_device).update(weights)
    assert len(updated) == len(engine.runner.model.named_weights())
    engine.add(0, PROMPTS[1])
    engine.run()
    assert engine.tokens[0] == expected(other, PROMPTS[1], 4)
    assert engine.tokens[0] != expected(reference, PROMPTS[1], 4)


@pytest.mark.slow
def test_each_rank_rounds_its_keys_and_values(llama: Any, make: Any) -> None:
    _, directory = llama
    rounded = round_keys_and_values(reference_model("llama", SCALE, **SHAPE | KV_HEADS))
    engine = make(with_float8(make_config(directory)))
    assert engine.runner.info.kv_cache_dtype == "fp8"
    for number, prompt in enumerate(PROMPTS):
        engine.add(number, prompt, logprobs=VOCAB)
    engine.run()
    for number, prompt in enumerate(PROMPTS):
        assert_logprobs(engine, number, rounded, prompt)


@pytest.mark.slow
def test_functions_run_on_each_rank(llama: Any, make: Any) -> None:
    engine = make(make_config(llama[1], mode="NONE"))
    call = RpcCall(lambda worker: worker.rank, (), {})
    found = engine.runner.everywhere(lambda: 0, lambda: pickle_call(call))
    assert found == [0, 1]


@pytest.mark.slow
def test_drafted_tokens_are_verified_by_all_ranks(
    saved: Callable[[str], Path], make: Any, gpu_device: FakeGpu
) -> None:
    config = drafting_config(saved("llama"), "FULL_AND_PIECEWISE")
    config = replace(config, cache=replace(config.cache, memory_bytes=2**21))
    found = []
    for engine in (make(config), Engine(config, gpu_device)):
        draft_with(engine, ScriptedDrafter({0: [3, 50] * 20, 1: [2] * 40}, MIXED))
        for number in (0, 1):
            engine.add(number, PROMPTS[number], temperature=0.7, seed=number, max_tokens=9)
        engine.run()
        assert engine.core.scheduler.stats.draft_tokens > 0
        found.append(engine.tokens)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "is_right"), [("FULL_AND_PIECEWISE", False), ("NONE", True)])
def test_the_first_rank_drafts_for_all(
    saved: Callable[[str], Path],
    other: Path,
    make: Any,
    gpu_device: FakeGpu,
    mode: str,
    is_right: bool,
) -> None:
    config = drafting_config(saved("llama"), mode)
    config = replace(config, cache=replace(config.cache, memory_bytes=2**21))
    plain = Engine(config, gpu_device)
    ours = make(with_model(config, saved("llama") if is_right else other))
    for engine in (plain, ours):
        for number in (0, 1, 2):
            options = {"temperature": 0.7 * number, "seed": number, "max_tokens": 9, "logprobs": 2}
            engine.add(number, PROMPTS[number], **options)
    plain.run()
    with ended_in_time(ours):
        ours.run()
    assert ours.tokens == plain.tokens
    assert_same_logprobs(ours, plain)
    stats = ours.core.scheduler.stats
    assert stats.draft_tokens > 0
    assert not is_right or stats.accepted_tokens == stats.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_a_layer_behind_drafts_on_all_ranks(
    further: Path, make: Any, gpu_device: FakeGpu, mode: str
) -> None:
    """Rank 0 tells of steps while others are under way. It waits until the others have launched
    these, which are computed as they are launched."""
    gpu_device.progress = eager
    config = with_further(latent_config(further, mode, sizes=(4,)), 2)
    found = []
    for engine in (make(config), Engine(config, gpu_device)):
        drafted = record_drafts(engine)
        for number in (0, 1, 2):
            options = {"temperature": 0.7 * number, "seed": number, "max_tokens": 9}
            engine.add(number, PROMPTS[number], **options)
        with ended_in_time(engine) if not found else nullcontext():
            engine.run()
        assert len(drafted) > 5
        found.append((engine.tokens, drafted))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["mamba2", slow("llama")])
def test_the_cache_is_that_of_the_rank_with_the_least_memory(
    saved: Callable[[str], Path],
    gpu_device: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Also if layers have only states, and so no blocks of keys and values to compare."""

    def with_another(ranks: NoRanks, own: Callable[[], Any], name: str, *arguments: Any) -> Any:
        if name != "size_cache":
            return [own()]
        less = replace(config.cache, memory_bytes=2**19)
        found.extend([own(), GpuPart(replace(config, cache=less), gpu_device).size_cache()])
        return found

    config = make_config(saved(family), mode="NONE")
    config = replace(config, cache=replace(config.cache, memory_bytes=2**20))
    found: list[CacheSize] = []
    monkeypatch.setattr(NoRanks, "together", with_another)
    info = Engine(config, gpu_device).runner.info
    more, less = found
    assert more.num_states + more.num_blocks > less.num_states + less.num_blocks
    assert (info.kv_cache_bytes, info.num_states) == (less.num_bytes, less.num_states - 1)


def test_the_end_of_a_rank_ends_the_steps_that_wait_for_it(llama: Any, make: Any) -> None:
    engine = make(make_config(llama[1]))
    engine.add(0, PROMPTS[0], max_tokens=30)
    engine.step()
    (rank,) = engine.runner._ranks._others
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(RankDeadError, match=rf"rank 1 .pid {rank.pid}. was ended by SIGKILL"):
        engine.run()


@pytest.mark.slow
def test_a_rank_that_cannot_be_built_ends_the_start(
    llama: Any, make: Any, gpu_device: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for the first one in its launches by then."""

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_device, "end_capture", fail)
    before = _children()
    with pytest.raises(EngineStartError, match="graph of 4 tokens cannot be captured"):
        make(make_config(llama[1]))
    assert _children() == before


def _children() -> list[str]:
    """The pids of this process's children."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
