"""The choice of tile sizes and splits for a step's attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shmllm.models.families import llama
from shmllm.models.fields import Fields
from shmllm.worker.gpu.attention_launches import (
    DETERMINISTIC_SPLITS,
    AttentionLaunches,
    max_verified,
)
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm_kernels.gpu import configs

PROCESSORS = 132
LLAMA_8B = llama.configure(
    Fields(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
        "config.json",
    )
)
MAX_TOKENS, MAX_REQUESTS = 4096, 256


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr(configs, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(configs, "_num_multiprocessors", lambda index: PROCESSORS)
    return AttentionLaunches(LLAMA_8B, torch.bfloat16, torch.device("cuda", 0), False)


def choose(launches, num_tokens, num_reqs, *, uniform=False):
    """The only choice of a model whose layers have the same heads."""
    step = BatchDescriptor(num_tokens, num_reqs, uniform)
    (launch,) = launches.choose(step, num_tokens).values()
    return launch


def choose_verifying(launches, num_tokens):
    """The choice for a step of so many tokens with padding, in which drafts are verified."""
    num_reqs = min(num_tokens, MAX_REQUESTS)
    step = BatchDescriptor(num_tokens, num_reqs, False, 0, launches.max_verified)
    (launch,) = launches.choose(step, num_tokens).values()
    return launch


def splits(launches, num_tokens, num_reqs, *, uniform=False):
    return choose(launches, num_tokens, num_reqs, uniform=uniform).num_splits


def test_steps_with_few_programs_are_split(launches):
    assert splits(launches, 1, 1, uniform=True) == configs.MAX_SPLITS
    assert splits(launches, 24, 24, uniform=True) == 2
    assert splits(launches, 256, 256, uniform=True) == 1
    assert splits(launches, 64, 1) == configs.MAX_SPLITS, "a short extension of a long context"
    assert splits(launches, 520, 8) > 1, "a chunk with decodes"
    assert splits(launches, 4096, 1) == 1


def test_a_padded_decode_is_split_like_its_requests(launches):
    """A piecewise graph of 64 tokens may serve four decodes."""
    assert splits(launches, 64, 4, uniform=True) == splits(launches, 4, 4, uniform=True) > 1


def test_deterministic_steps_have_a_number_of_splits_of_their_kind(launches):
    launches = replace(launches, deterministic=True)
    for num_reqs in (1, 24, 256):
        assert splits(launches, num_reqs, num_reqs, uniform=True) == DETERMINISTIC_SPLITS
        assert splits(launches, num_reqs + 1, num_reqs) == 1
    assert choose(launches, 64, 1).masks_all


def test_drafts_are_verified_by_the_launch_of_decodes(launches):
    launches = replace(launches, max_verified=5)
    launch = choose_verifying(launches, 8)
    assert (launch.max_tokens, launch.config.block_m) == (5, 32), "four heads of five tokens"
    assert launch.num_splits == configs.MAX_SPLITS, "there may be as few as two requests"
    assert launch.masks_all
    assert launch.loads_first
    assert choose_verifying(launches, 1280).num_splits == 1
    assert choose(launches, 1, 1, uniform=True).max_tokens == 1
    assert not choose(launches, 8, 2).max_tokens, "two prompts"
    assert choose_verifying(replace(launches, deterministic=True), 8).num_splits == (
        DETERMINISTIC_SPLITS
    )


def test_heads_whose_sums_are_too_large_have_the_launches_of_prompts(launches):
    wide = replace(LLAMA_8B.attentions[0], head_dim=512)
    model = replace(LLAMA_8B, layers=(replace(LLAMA_8B.layers[0], mixer=wide),))
    launches = replace(launches, model=model, max_verified=16)
    assert choose_verifying(launches, 8) == choose(launches, 8, 8)


@pytest.mark.parametrize(("most_drafted", "most"), [(0, 0), (1, 2), (8, 9), (15, 16), (16, 0)])
def test_the_most_tokens_of_a_request_whose_drafts_are_verified(most_drafted, most):
    assert max_verified(most_drafted) == most


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_scratch_memory_is_for_every_step_and_bounded(launches, deterministic):
    launches = replace(launches, deterministic=deterministic, max_verified=5)
    sums, stats = launches.scratch_sizes(MAX_TOKENS, MAX_REQUESTS)
    most = stats // (2 * 32)
    assert sums == most * 32 * 128
    for requests in range(1, MAX_REQUESTS + 1):
        number = splits(launches, requests, requests, uniform=True)
        assert number == 1 or requests * number <= most
        for tokens in range(requests + 1, MAX_TOKENS, 61):
            number = splits(launches, tokens, requests)
            assert number == 1 or tokens * number <= most
    for tokens in range(2, 5 * MAX_REQUESTS + 1):
        number = choose_verifying(launches, tokens).num_splits
        assert number == 1 or tokens * number <= most
    rows = 4 * PROCESSORS * 128
    bound = 5 * MAX_REQUESTS * 32 * DETERMINISTIC_SPLITS if deterministic else rows
    assert most * 32 <= bound


def test_every_choice_has_a_variant_and_no_two_variants_are_alike(launches):
    launches = replace(launches, max_verified=5)
    variants = launches.variants(MAX_TOKENS, MAX_REQUESTS)
    found = [next(iter(launches.choose(step, step.num_tokens).values())) for step in variants]
    assert len(set(found)) == len(found)
    for requests in range(1, MAX_REQUESTS + 1):
        assert choose(launches, requests, requests, uniform=True) in found
        for tokens in range(requests + 1, MAX_TOKENS, 97):
            assert choose(launches, tokens, requests) in found
    for tokens in range(2, 5 * MAX_REQUESTS + 1):
        assert choose_verifying(launches, tokens) in found


def test_layers_with_other_heads_have_launches_of_their_own(launches):
    wide = replace(LLAMA_8B.attentions[0], num_kv_heads=2, head_dim=512)
    layers = (LLAMA_8B.layers[0], replace(LLAMA_8B.layers[0], mixer=wide))
    both = replace(launches, model=replace(LLAMA_8B, layers=layers))
    chosen = both.choose(BatchDescriptor(16, 16, True), 1)
    assert [shape.head_dim for shape in chosen] == [128, 512]
    assert next(iter(chosen.values())) == choose(launches, 16, 16, uniform=True)
    assert (
        both.scratch_sizes(MAX_TOKENS, MAX_REQUESTS)[0]
        > launches.scratch_sizes(MAX_TOKENS, MAX_REQUESTS)[0]
    )


def test_one_token_and_one_request_have_one_variant(launches):
    assert launches.variants(1, 1) == [BatchDescriptor(1, 1, True)]
