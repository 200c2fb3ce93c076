"""Compiles every launch of the Triton kernels for a GPU that the machine need not have.

The command `python kernel_launches.py CAPABILITY PART...` prints one JSON line for each kernel. A
PART is "rows" (all kernels but the following), "experts" (of these, the kernels of mixtures),
"some-attention" or "all-attention", "some-latents" or "all-latents", "some-float8" or "all-float8"
(attention with FP8 keys and values), "some-decodes" or "decodes" (products of one row, too),
"limited-decodes" (with few registers), "all-few-rows", "all-many-rows" (from 9.0 on),
"all-decoders" (all layers in one launch), "some-packed" (kernels that read packed weights) or
"packed=KIND" (those of a kind).
Compiling needs the compute capability only. It finds errors that the interpreter cannot: types that
change in a loop, registers that spill, shared memory that does not fit, arithmetic that became
float64, and loops that wait for each load.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from support.compiled_code import facts_of
from support.decoder_case import DecoderCase, DecoderShape
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from shmllm.models.matrices import FORMATS
from shmllm_kernels.gpu import (
    activation,
    altup,
    connections,
    delta_net,
    few_mamba_inputs,
    few_mamba_scan,
    mamba,
    mamba2,
    norm,
    per_layer,
    relations,
)
from shmllm_kernels.gpu import many_rows as many
from shmllm_kernels.gpu.attention import AttentionScratch, paged_attention
from shmllm_kernels.gpu.block_indexer import choose_blocks
from shmllm_kernels.gpu.combined_row import combine_products
from shmllm_kernels.gpu.compression import CacheRows, Made, compress
from shmllm_kernels.gpu.configs import (
    LARGEST_BLOCK,
    ROWS_OF_PRODUCTS,
    SMALLEST_BLOCK,
    AttentionConfig,
    latent_entry,
    packed_entry,
    product_entry,
    table_entry,
    verify_entry,
)
from shmllm_kernels.gpu.convolution import MOST_TAPS, convolve
from shmllm_kernels.gpu.decode_attention import decode_attention
from shmllm_kernels.gpu.decoder import attention_tile, run_layers
from shmllm_kernels.gpu.expert_lora import ExpertPlaces, PairAdapters, shrink_pairs
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.few_delta_net import run_delta_net
from shmllm_kernels.gpu.few_mamba2 import run_mamba2
from shmllm_kernels.gpu.few_routing import route_rows
from shmllm_kernels.gpu.few_rows import multiply_rows
from shmllm_kernels.gpu.group import Peers, make_counts, meet, sum_parts
from shmllm_kernels.gpu.identities import take_identities
from shmllm_kernels.gpu.indexer import RequestTables, choose_tokens, store_index_keys
from shmllm_kernels.gpu.last_rotated import rotate_heads, store_keys, store_rows
from shmllm_kernels.gpu.latent_attention import attend_parts, paged_latent_attention
from shmllm_kernels.gpu.latent_heads import absorb_queries, project_values
from shmllm_kernels.gpu.latent_write import write_latents
from shmllm_kernels.gpu.left_out import leave_out
from shmllm_kernels.gpu.listed_keys import Entries, Pages, Scored, list_keys
from shmllm_kernels.gpu.logits_processors import add_biases, count_tokens
from shmllm_kernels.gpu.lora import LoraPlaces, StepUnits, add_adapters
from shmllm_kernels.gpu.packings import PackedRows, Rows
from shmllm_kernels.gpu.pair_layout import LayoutScratch, PairLayout
from shmllm_kernels.gpu.pairs import SortedPairs, sort_pairs
from shmllm_kernels.gpu.products import linear
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.gpu.routing import route
from shmllm_kernels.gpu.routing_by_token import route_by_token
from shmllm_kernels.gpu.row_adapters import RowAdapters
from shmllm_kernels.gpu.row_configs import (
    decoder_config,
    few_rows_config,
    many_rows_config,
    packed_row_config,
    single_row_config,
)
from shmllm_kernels.gpu.row_copies import TableShare, embed, gather_rows
from shmllm_kernels.gpu.row_operands import Activation, AddedNorm, RowNorm
from shmllm_kernels.gpu.sampling import DraftedTokens, SamplingScratch, TokenMasks, sample
from shmllm_kernels.gpu.scoring import Scores, score
from shmllm_kernels.gpu.shared_expert import SharedExpert, joined, parts_of
from shmllm_kernels.gpu.short_convolution import short_convolution
from shmllm_kernels.gpu.single_row import config_of, multiply_row
from shmllm_kernels.gpu.states import Requests
from shmllm_kernels.gpu.step import rope_tables, unpack_step
from shmllm_kernels.gpu.weights_ahead import WeightsAhead
from shmllm_kernels.gpu.xielu import xielu
from shmllm_kernels.reference.moe import Choice
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth
from shmllm_kernels.reference.sampling import SamplingColumns
from shmllm_kernels.reference.step import LearnedRows, StepSizes, StepTensors

VOCAB_SIZE = 128_256
MOST_OF_SOME = 1
MEETINGS = ("_sum_parts", "_meet")
HALVES = (torch.bfloat16, torch.float16)


class AbsentDevice:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def report(module: str, name: str, kernel: Any, facts: dict[str, Any]) -> None:
    print(json.dumps(facts | {"kernel": name, "module": module} | facts_of(kernel)), flush=True)


def compile_instead_of_launching(capability: int, facts: dict[str, Any], some: bool) -> None:
    """Make all launches compile only, and report each kernel with `facts` about its launch. If
    `some`, only the first launches of each kernel are compiled, but for attention and meetings."""
    driver.set_active(AbsentDevice(capability))
    run = JITFunction.run
    compiled: Counter[str] = Counter()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = self.fn.__name__
        compiled[name] += 1
        is_one_of_many = compiled[name] > MOST_OF_SOME and name not in MEETINGS
        if some and is_one_of_many and "shape" not in facts:
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        report(self.fn.__module__.rpartition(".")[2], name, kernel, facts)
        return kernel

    JITFunction.run = compile_only


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def connected(hidden: int) -> None:
    """Launch hyper-connections with the shapes of HY V4, those of a layer and the last one, and
    those of a layer that mixes the streams."""
    streams, x = empty(4, 4 * hidden), empty(4, hidden)
    numbers = connections.GateNumbers(1e-5, 2.0, 1e-6, 1e-6)
    for kinds, num_gates, width in ((1, 4, 8), (2, 8, 8), (3, 24, 24)):
        weight, scale, bias, gates, parts = (
            empty(*shape, dtype=torch.float32)
            for shape in (
                (num_gates, 4 * hidden), (kinds,), (num_gates,), (4, width),
                (4, connections.num_parts(4 * hidden), num_gates + 1),
            )
        )  # fmt: skip
        connections.fold(x, gates, streams, parts, weight, scale, bias, numbers, 20)
        if kinds > 1:
            connections.spread(streams, x, gates)


def rows(capability: int) -> None:
    x, gate_up = empty(4, 4096), empty(4, 2 * 14_336)
    norm.rms_norm(x, x, x[0], 1e-5)
    norm.add_rms_norm(x, x, x.clone(), x[0], 1e-5)
    norm.add_rms_norm(x, x, x.clone(), x[0], 1e-5, 0.5, 1.0)
    if capability >= 90:
        norm.rms_norm(x, x, x[0], 1e-5, is_dependent=True)
        norm.add_rms_norm(x, x, x.clone(), x[0], 1e-5, is_dependent=True)
    norm.add_normed(x, x.clone(), x[0], 1e-5, is_dependent=capability >= 90)
    pair = norm.NormedPair(x.clone(), x[0], x[0])
    norm.add_normed(x, x.clone(), x[0], 1e-5, factor=empty(1), pair=pair)
    norm.layer_norm(x, x, x[0], x[0], 1e-5)
    norm.layer_norm(x, x, x[0], None, 1e-5, x.clone(), 0.5)
    for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"):
        activation.activate(empty(4, 14_336), gate_up, name, is_gated=True)
    for name in ("silu", "silu_clamped", "silu_shifted"):
        activation.activate(empty(4, 14_336), gate_up, name, is_gated=True, bound=7.0)
    activation.activate_sparse(empty(4, 14_336), gate_up, "gelu_tanh", 1.645)
    for name in ("gelu", "gelu_tanh"):
        activation.activate(gate_up, gate_up.clone(), name, is_gated=False)
    xielu(gate_up, gate_up.clone(), empty(4, dtype=torch.float32))
    cache, angles = empty(2, 8, 16, 8, 128), empty(4, 1, 128)
    slots = empty(4, dtype=torch.int64)
    norms = HeadNorms(angles[0, 0], angles[0, 0], 1e-6)
    query, heads = empty(4, 32, 128), empty(4, 48, 128)
    behind = norms._replace(is_behind=True)
    for kind in (None, norms, norms._replace(offset=1.0), norms._replace(has_values=True), behind):
        rope_and_write(query, cache[0], cache[1], heads, angles, angles, slots, kind)
    rope_and_write(query, cache[0], cache[1], heads[:, :32], angles, angles, slots, norms)
    rope_and_write(query, cache[0], cache[1], heads, None, None, slots)
    rope_and_write(query[:, :0], cache[0], cache[1], heads[:, :16], None, None, slots)
    part = empty(4, 1, 64)
    rope_and_write(query, cache[0], cache[1], heads, part, part, slots, norms)
    rope_and_write(query, cache[0], cache[1], heads, part, part, slots, interleaved=True)
    rope_and_write(
        query, cache[0], cache[1][..., :64], heads[:, :40], angles, angles, slots,
        values=heads[:, 40:, :64].contiguous(),
    )  # fmt: skip
    of_each = HeadNorms(query[0], heads[0, :8].clone(), 1e-5, is_centered=True)
    rope_and_write(query, cache[0], cache[1], heads, part, part, slots, of_each, interleaved=True)
    biased = HeadNorms(query[0, :2], query[1, :2], 1e-5, is_centered=True, has_bias=True)
    rope_and_write(query, cache[0], cache[1], heads, part, part, slots, biased)
    rope_and_write(
        query, cache[0], cache[1], heads, angles, angles, slots,
        growth=QueryGrowth(0.1, 16384), positions=slots,
    )  # fmt: skip


def delta_nets(facts: dict[str, Any], capability: int) -> None:
    """Launch a delta net of Qwen3.6-35B-A3B, of its safetensors and of its GGUF file, and one with
    decays by channel, of Kimi-Linear-48B-A3B."""
    heads = key_heads, key_dim, value_heads, value_dim = 16, 128, 32, 128
    convolved, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    starts, lengths, table = (empty(*shape, dtype=torch.int32) for shape in ((5,), (4,), (4, 8)))
    requests = Requests(starts, lengths, table, 512)
    states = empty(8, value_heads * key_dim * value_dim, dtype=torch.float32)
    x, out, gates = empty(4, convolved), empty(4, values), empty(4, 2 * value_heads)
    for taps in range(2, MOST_TAPS + 1):
        convolve(x, empty(taps, convolved), None, states, requests)
    logs = empty(value_heads, dtype=torch.float32)
    biases = gates[0, :value_heads]
    for is_sigmoid in (False, True):
        delta_net.gated_norm(out, out.clone(), out[0, :value_dim], 1e-6, is_sigmoid)
    wide = empty(4, 8192)  # all heads of MiniMax-Text-01
    delta_net.gated_norm(wide, wide.clone(), wide[0].clone(), 1e-6, is_sigmoid=True)
    for least in (None, -5.0):
        delta_net.delta_rule(
            out, empty(4, 3 * values), gates[:, :value_heads], out.clone(), logs,
            empty(values, dtype=torch.float32), states, requests,
            (value_heads, value_dim, value_heads, value_dim), least=least,
        )  # fmt: skip
    wide, counters = empty(4, convolved + values + 64), empty(64, dtype=torch.int32)
    for is_tiled in (False, True):
        rates, decays = gates.split(value_heads, 1)
        delta_net.delta_rule(out, x, rates, decays, logs, biases, states, requests, heads, is_tiled)
        facts["is_dependent"] = capability >= 90
        run_delta_net(
            out, wide, empty(4, convolved), out[0, :value_dim], logs, biases, states, counters,
            requests, heads, 1e-6, capability >= 90, is_tiled,
        )  # fmt: skip
        facts.clear()


def mambas(facts: dict[str, Any], capability: int) -> None:
    """Launch a Mamba 2 of Granite-4.0-H-Small and a Mamba of Jamba-1.7-Mini."""
    starts, lengths, table = (empty(*shape, dtype=torch.int32) for shape in ((5,), (4,), (4, 8)))
    requests, limits = Requests(starts, lengths, table, 512), (0.0, math.inf)
    sizes = heads, head_dim, groups, state_size = 128, 64, 1, 128
    inner, keys = heads * head_dim, groups * state_size
    states = empty(8, inner * state_size, dtype=torch.float32)
    x, out, times = empty(4, inner + 2 * keys), empty(4, inner), empty(4, heads)
    convolve(x, empty(4, inner + 2 * keys), x[0].clone(), states, requests)
    of_heads = empty(heads, dtype=torch.float32)
    mamba2.scan(out, x, times, of_heads, of_heads, of_heads, states, requests, sizes, limits)
    for weight, gates_first in ((out[0].clone(), True), (out[0].clone(), False), (None, True)):
        mamba2.gated_norm(out, out.clone(), weight, groups, 1e-6, gates_first)
    wide, counters = empty(4, inner + 2 * keys + heads), empty(4, dtype=torch.int32)
    facts["is_dependent"] = capability >= 90
    run_mamba2(
        out, wide, empty(4, inner + 2 * keys), x[0].clone(), of_heads, of_heads, of_heads, states,
        counters, requests, sizes, limits, capability >= 90,
    )  # fmt: skip
    facts.clear()
    logs, skips = empty(16, inner, dtype=torch.float32), empty(inner, dtype=torch.float32)
    gate, keys_of = empty(4, 2 * inner)[:, inner:], empty(4, 256 + 32)
    for weights in (None, [empty(256), empty(16), empty(16)]):
        mamba.normalise(keys_of, (256, 16, 16), weights, 1e-6)
    mamba.selective_scan(out, gate, keys_of[:, 256:], gate, logs, skips, states, requests)
    few_mambas(facts, capability, requests)
    many, keys_of = empty(128, inner, dtype=torch.float32), empty(4, 256)
    mamba.selective_scan(out, gate, keys_of, gate, many, skips, states, requests)


def short_convolutions(facts: dict[str, Any], capability: int) -> None:
    """Launch convolutions of LFM2-1.2B and LFM3-1.7B, with and without biases."""
    starts, lengths, table = (empty(*shape, dtype=torch.int32) for shape in ((5,), (4,), (4, 8)))
    requests, width = Requests(starts, lengths, table, 512), 2048
    facts["is_dependent"] = is_dependent = capability >= 90
    for dtype, taps in (*((each, 3) for each in (*HALVES, torch.float32)), (torch.bfloat16, 7)):
        facts |= {"dtype": str(dtype), "taps": taps}
        states = empty(8, (taps - 1) * width, dtype=torch.float32)
        x, weights = empty(4, 3 * width, dtype=dtype), empty(taps, width, dtype=dtype)
        out = empty(4, width, dtype=dtype)
        for bias in (None, weights[0]):
            for ahead in (0, taps // 2):
                options = is_dependent, ahead
                short_convolution(out, x, weights, bias, states, requests, 4, *options)
    facts.clear()


def few_mambas(facts: dict[str, Any], capability: int, requests: Requests) -> None:
    """Launch a Mamba of Jamba-1.7-Mini and one of Falcon-Mamba-7B, of few tokens."""
    channels, rank, state_size, taps = 8192, 256, 16, 4
    facts["is_dependent"] = is_dependent = capability >= 90
    for dtype in (*HALVES, torch.float32):
        facts["dtype"] = str(dtype)
        width = rank + 2 * state_size
        x, projected = empty(4, 2 * channels, dtype=dtype), empty(4, width, dtype=dtype)
        convolution = empty(taps, channels, dtype=dtype), x[0, :channels]
        states = empty(8, (taps - 1 + state_size) * channels, dtype=torch.float32)
        logs, skips = states[:, : state_size * channels], states[0, :channels]
        parts = empty(4, few_mamba_inputs.num_parts(channels), width, dtype=torch.float32)
        counters = empty(few_mamba_inputs.num_row_blocks(width), dtype=torch.int32)
        few_mamba_inputs.project_inputs(
            projected, parts, x, *convolution, empty(width, channels, dtype=dtype), states,
            counters, requests, is_dependent,
        )  # fmt: skip
        steps = empty(channels, rank, dtype=dtype), x[0, :channels]
        norms = [projected[0, :rank], projected[0, :state_size], projected[0, :state_size]]
        for weights, eps in ((norms, 1e-6), (None, 1e-6), (None, None)):
            few_mamba_scan.scan_inputs(
                x[:, :channels], x, projected, *convolution, *steps, weights, eps,
                logs[0].view(state_size, channels), skips, states, requests, is_dependent,
            )  # fmt: skip
    facts.clear()


def step() -> None:
    ids, x = empty(4, dtype=torch.int64), empty(4, 4096)
    embed(x, x.clone(), ids, ids)
    embed(x, x.clone(), ids, ids, 64.0)
    for count in (1, 2):
        embed(x, x.clone(), ids, ids, learned=[LearnedRows(x.clone(), ids)] * count)
    for keeps in (True, False):
        embed(x, x.clone(), ids, ids, share=TableShare(4, keeps))
    gather_rows(x, x.clone(), ids)
    of_layers = empty(4, 35 * 256)
    per_layer.embed_per_layer(
        of_layers, of_layers.clone(), ids, ids, of_layers[0, :256], 1e-6, 0.02, 16.0, 0
    )
    per_layer.gate_layer_input(of_layers[:, 256:512], empty(4, 256), "gelu_tanh")
    for keys, queries in ((x, x), (x, None), (None, x)):
        distances, ends = empty(1023, dtype=torch.int32), empty(4, dtype=torch.int32)
        sums = empty(4, 64, 512, dtype=torch.float32)
        relations.relate(sums, x, x, keys, queries, distances, ids, ends, 0.1)
    streams, routed, rows = empty(4, 4, 2048), empty(4, 4), empty(4, 2048)
    altup.predict(streams, routed, empty(16, 4), 2**-11, 0, rows)
    for scale in (None, empty(2048)):
        altup.correct(streams, rows, routed, empty(4, 4), 2**-11, 0, scale)
    altup.match_magnitude(rows, empty(4, 2048), empty(4, 2048))
    connected(2816)
    angles = empty(4, 128), empty(4, 128)
    frequencies, axes = empty(64, dtype=torch.float32), empty(64, dtype=torch.int64)
    rope_tables(*angles, ids, frequencies, 1.0)
    rope_tables(*angles, ids, frequencies, 1.0, rate=128)
    rope_tables(*angles, empty(3, 4, dtype=torch.int64), frequencies, 1.0, axes)
    sizes = StepSizes(4, 2, 2)
    for options in ((1, 0, False), (2, 2, True), (1, 0, False, 3)):
        tensors = StepTensors.allocate(sizes, "cpu", *options)
        packed = empty(tensors.num_packed(sizes), dtype=torch.int64)
        unpack_step(tensors, packed, sizes, sizes)


def meetings() -> None:
    """Launch the sums of 2 and of 8 ranks."""
    word = empty(1, dtype=torch.int64)
    for size in (2, 8):
        peers = Peers(1, size, word, make_counts(word.device), word)
        for dtype in (*HALVES, torch.int64):
            sum_parts(empty(4, 4096, dtype=dtype), 1024, peers)
        sum_parts(empty(4, 4096), 1024, peers, adds=True)
        meet(peers, waits=True)
        meet(peers, waits=False)


def room(num_pairs: int, num_experts: int) -> SortedPairs:
    """Memory for sorted pairs in blocks of any size."""
    return SortedPairs.allocate(num_pairs, num_experts, SMALLEST_BLOCK, LARGEST_BLOCK, integers)


def integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def identities() -> None:
    """Launch what returns the rows that LongCat-Flash's experts read, of each dtype."""
    for dtype in (*HALVES, torch.float32):
        x, weights = empty(4, 6144, dtype=dtype), empty(4, 12, dtype=torch.float32)
        take_identities(x, x.clone(), empty(4, 12, dtype=torch.int32), weights, 512)


def left_out() -> None:
    """Launch what leaves tokens out of both mixtures of ERNIE 4.5 VL, and a sum without them."""
    words = empty(4, dtype=torch.int64)
    for are_listed in (False, True):
        leave_out(integers(4, 6), empty(4, 6, dtype=torch.float32), words, words, words, are_listed)
    x = empty(4, 2560)
    combine(WeightedSum(x, empty(4, 6, dtype=torch.float32), skips=True), empty(24, 2560))


OF_ROOTS = Choice(divides_by_all=False, is_sigmoid=True, is_sqrt_softplus=True, scale=1.5)


def routers(facts: dict[str, Any], capability: int) -> None:
    """Launch the routers of DeepSeek-V3, DeepSeek-V2, ERNIE 4.5 21B-A3B, Phi-3.5-MoE, Kolibri 1 and
    DeepSeek-V4, with its choice by the ids of tokens."""
    words = empty(4, dtype=torch.int64)
    route_by_token(
        integers(4, 6), empty(4, 6, dtype=torch.float32), empty(4, 256), integers(2), OF_ROOTS,
        words, words, empty(1000, 6, dtype=torch.float32),
    )  # fmt: skip
    starts, in_groups = empty(2, dtype=torch.int32), Choice(divides_by_all=False, num_groups=8)
    for count, top_k, hidden, choice in (
        (256, 8, 7168, replace(in_groups, is_sigmoid=True, top_groups=4, num_best=2, scale=2.5)),
        (160, 6, 5120, replace(in_groups, divides_by_all=True, top_groups=3, scale=2.5)),
        (64, 6, 2560, Choice(divides_by_all=False)),
        (16, 2, 4096, Choice(divides_by_all=True, mixer_limit=0.02)),
        (384, 6, 2560, Choice(divides_by_all=False, is_sigmoid=True, ranks_logits=True)),
        (256, 6, 4096, OF_ROOTS),
    ):
        ids, weights = empty(4, top_k, dtype=torch.int32), empty(4, top_k, dtype=torch.float32)
        logits, bias = empty(4, count, dtype=torch.float32), empty(count, dtype=torch.float32)
        has_bias = not choice.divides_by_all
        layout = PairLayout(
            room(4 * top_k, count), LayoutScratch.allocate(count, top_k, integers), 16
        )
        bias_of = bias if has_bias else None
        route(ids, weights, logits, starts, choice, bias_of, layout=layout)
        exact = torch.float32 if has_bias else torch.bfloat16
        for tokens in (1, 4):
            launch_router(
                facts, tokens, hidden, exact, choice, ids, bias_of, layout, capability >= 90
            )


def launch_router(
    facts: dict[str, Any],
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    choice: Choice,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    layout: PairLayout,
    is_dependent: bool,
) -> None:
    """Launch the choice of few tokens with the router's product, of rows in bfloat16."""
    count, starts = len(layout.scratch.counts[0]), empty(2, dtype=torch.int32)
    facts |= {"is_dependent": is_dependent, "router": str(dtype), "tokens": tokens}
    x, own_ids = empty(tokens, hidden), ids[:tokens]
    norm = RowNorm(empty(hidden), 1e-6)
    apart: dict[str, Any] = {"factor": 0.5, "experts_norm": RowNorm(empty(hidden), 1e-6)}
    for options in ({}, apart):
        route_rows(
            own_ids, empty(*own_ids.shape, dtype=torch.float32), empty(tokens, count, dtype=dtype),
            count, x.clone(), x, norm, empty(count, hidden, dtype=dtype), None, starts,
            layout.scratch.num_done, choice, bias, None, layout if tokens > 1 else None,
            is_dependent, **options,
        )  # fmt: skip
    facts.clear()


def experts(facts: dict[str, Any], key: str, capability: int) -> None:
    """Launch the mixtures of Qwen3-30B-A3B and of gpt-oss-20b with every entry of the table, and
    the last product, as the engine does from 9.0 on, dependent on the one before."""
    is_dependent = capability >= 90
    starts = empty(2, dtype=torch.int32)
    for count, top_k, hidden, inner in ((128, 8, 2048, 768), (32, 4, 2880, 2880)):
        is_silu = top_k == 8
        ids, weights = empty(4, top_k, dtype=torch.int32), empty(4, top_k, dtype=torch.float32)
        pairs, choice = room(ids.numel(), count), Choice(divides_by_all=is_silu)
        layout = PairLayout(pairs, LayoutScratch.allocate(count, top_k, integers), 16)
        route(ids, weights, empty(4, count), starts, choice, None, empty(count), layout)
        route(ids, weights, empty(4, count), starts, choice)
        for tokens in (1, 4):
            launch_router(
                facts, tokens, hidden, torch.bfloat16, choice, ids, None, layout, is_dependent
            )
        sort_pairs(pairs, ids, count, 16)
        rows, x = empty(4 * top_k, hidden), empty(4, hidden)
        combine(WeightedSum(x, weights), rows, is_dependent)
        combine(WeightedSum(x, weights, x.clone(), weights[:, 0], True, 0.5), rows)
        for dtype, most in itertools.product((torch.bfloat16, torch.float32), (16, 64, 128)):
            config = product_entry(key, most, dtype)
            # Nobody writes these, so that they take no memory.
            gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype)
            last = torch.empty(count, hidden, inner, dtype=dtype)
            facts |= {"dtype": str(dtype), "rows": most, "experts": count} | asdict(config)
            biases: list[torch.Tensor | None] = [None, None]
            if not is_silu:
                biases = [empty(*matrix.shape[:2], dtype=dtype) for matrix in (gate_up, last)]
            activated = empty(4 * top_k, inner, dtype=dtype)
            gate_and_up(
                activated, x.to(dtype), gate_up, biases[0], "silu" if is_silu else "gpt_oss",
                top_k, pairs, config, is_dependent=is_dependent,
            )  # fmt: skip
            out = rows.to(dtype)
            down(out, activated, last, biases[1], top_k, pairs, config, is_dependent=is_dependent)
            if is_silu:
                for bounded in ("silu_bounded", "silu_clamped", "silu_shifted"):
                    gate_and_up(
                        activated, x.to(dtype), gate_up, None, bounded, top_k, pairs, config,
                        is_dependent=is_dependent, bound=7.0,
                    )  # fmt: skip
                up = torch.empty(count, inner, hidden, dtype=dtype)
                gate_and_up(
                    activated, x.to(dtype), up, None, "relu_squared", top_k, pairs, config,
                    is_dependent=is_dependent,
                )  # fmt: skip
        facts.clear()
        last = torch.empty(count, hidden, inner, dtype=torch.bfloat16)
        bias = None if is_silu else empty(count, hidden)
        of_one = WeightedSum(x[:1], weights[:1], None if is_silu else x[1:2], adds=is_silu)
        launch_sum_of_one(facts, of_one, last, ids[0], bias, is_dependent)
        facts.clear()


def shared_experts(facts: dict[str, Any], key: str, capability: int) -> None:
    """Launch the mixture of DeepSeek-V2-Lite with its shared expert, which is as wide as two
    others, for one token and for four, and also with weights of inputs, or without a gate."""
    count, top_k, hidden, inner, parts = 64, 6, 2048, 1408, 2
    is_dependent, tokens = capability >= 90, 4
    ids, pairs = empty(top_k, dtype=torch.int32), room(tokens * top_k, count)
    last, own_last = empty(count, hidden, inner), empty(hidden, parts * inner)
    config = product_entry(key, 1, torch.bfloat16)
    x, weights = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32)
    gates = empty(tokens, 3)[:, 1]
    for name, halves, factors in (
        ("silu", 2, None),
        ("silu", 2, weights),
        ("relu_squared", 1, None),
    ):
        gate_up = empty(count, halves * inner, hidden)
        shared = joined(empty(halves * parts * inner, hidden), own_last, (gate_up, last))
        assert shared is not None
        activated = empty(tokens * (top_k + parts), inner)
        facts |= {"dtype": "torch.bfloat16", "rows": 1, "experts": count} | asdict(config)
        gate_and_up(
            activated, x, gate_up, None, name, top_k, pairs, config, None, is_dependent, shared,
            factors,
        )  # fmt: skip
        out = empty(len(activated), hidden)
        down(out, activated, last, None, top_k, pairs, config, None, is_dependent, shared)
        facts.clear()
        combine(WeightedSum(x, weights, None, gates, True), out, is_dependent, parts)
        of_one = config_of(gate_up, torch.device("cpu"))
        facts |= {"dtype": "torch.bfloat16", "n": inner, "k": hidden} | asdict(of_one)
        activation = Activation(name, halves == 2)
        multiply_row(
            activated[: top_k + parts], x[:1], gate_up, of_one, None, None, activation,
            is_dependent=is_dependent, ids=ids, shared=shared,
            gate_factors=None if factors is None else factors[:1],
        )  # fmt: skip
        facts.clear()
        total = WeightedSum(x[:1], weights[:1], None, gates[:1], True)
        launch_sum_of_one(facts, total, last, ids, None, is_dependent, shared)
        facts.clear()


def launch_sum_of_one(
    facts: dict[str, Any],
    total: WeightedSum,
    weight: Rows,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    is_dependent: bool,
    shared: SharedExpert | None = None,
) -> None:
    """Launch the last products of one token's experts with their sum."""
    config, dtype = config_of(weight, torch.device("cpu")), total.out.dtype
    facts |= {"dtype": str(dtype), "k": weight.shape[-1]} | asdict(config)
    x = empty(len(ids) + parts_of(shared), weight.shape[-1], dtype=dtype)
    combine_products(total, x, weight, config, ids, bias, is_dependent, shared)


def mixtures(facts: dict[str, Any], key: str, capability: int, parts: list[str]) -> None:
    """Launch the kernels of mixtures of experts but those of adapters and of packed weights."""
    if {"rows", "some-rows", "experts"} & set(parts):
        experts(facts, key, capability)
        shared_experts(facts, key, capability)
        routers(facts, capability)
        identities()
        left_out()


def unwritten(kind: str, *shape: int, dtype: torch.dtype) -> PackedRows:
    """Rows that nobody writes, so that they take no memory."""
    matrix = FORMATS[kind].make(shape, dtype, lambda size, dtype: torch.empty(size, dtype=dtype))
    return PackedRows.of(kind, matrix.integers, matrix.scales, shape[-1])


def packed(facts: dict[str, Any], key: str, kind: str, dtype: torch.dtype) -> None:
    """Launch all kernels that read packed weights of a kind, with every entry of the table."""
    ids = empty(4, dtype=torch.int64)
    facts |= {"kind": kind, "dtype": str(dtype)}
    x, out = empty(4, 4096, dtype=dtype), empty(4, 14_336, dtype=dtype)
    embed(x, unwritten(kind, VOCAB_SIZE, 4096, dtype=dtype), ids, ids)
    pairs = room(8, 32)
    gate_up = unwritten(kind, 32, 2 * 2816, 4096, dtype=dtype)
    last = unwritten(kind, 32, 4096, 2816, dtype=dtype)
    for rows in ROWS_OF_PRODUCTS:
        config = packed_entry(key, rows, dtype)
        facts |= {"rows": rows} | asdict(config)
        linear(out, x, unwritten(kind, 14_336, 4096, dtype=dtype), None, config)
        activated = empty(8, 2816, dtype=dtype)
        gate_and_up(activated, x, gate_up, None, "silu", 2, pairs, config)
        down(empty(8, 4096, dtype=dtype), activated, last, None, 2, pairs, config)
    of_one = WeightedSum(x[:1], empty(1, 4, dtype=torch.float32), adds=True)
    launch_sum_of_one(facts, of_one, last, ids.int(), None, False)
    packed_shared_expert(facts, key, kind, x, (gate_up, last))
    facts.clear()


def packed_shared_expert(
    facts: dict[str, Any], key: str, kind: str, x: torch.Tensor, of_experts: tuple[Rows, Rows]
) -> None:
    """Launch products with a packed shared expert that is as wide as two others, of one token and
    of more."""
    dtype, inner, parts, top_k = x.dtype, of_experts[1].shape[-1], 2, 2
    shared = joined(
        unwritten(kind, 2 * parts * inner, 4096, dtype=dtype),
        unwritten(kind, 4096, parts * inner, dtype=dtype), of_experts,
    )  # fmt: skip
    assert shared is not None
    config, pairs = packed_entry(key, 1, dtype), room(8, 32)
    rows = 4 * (top_k + parts)
    activated, out = empty(rows, inner, dtype=dtype), empty(rows, 4096, dtype=dtype)
    facts |= {"rows": 1} | asdict(config)
    gate_and_up(activated, x, of_experts[0], None, "silu", top_k, pairs, config, shared=shared)
    down(out, activated, of_experts[1], None, top_k, pairs, config, shared=shared)
    ids, of_one = empty(top_k, dtype=torch.int32), config_of(of_experts[0], torch.device("cpu"))
    facts |= {"k": 4096} | asdict(of_one)
    multiply_row(
        activated[: top_k + parts], x[:1], of_experts[0], of_one, None, None,
        Activation("silu", True), ids=ids, shared=shared,
    )  # fmt: skip
    total = WeightedSum(x[:1], empty(1, top_k, dtype=torch.float32), adds=True)
    launch_sum_of_one(facts, total, of_experts[1], ids, None, False, shared)


def packed_dtypes(kind: str) -> tuple[torch.dtype, ...]:
    """The dtypes of activations. One kind is compiled for float32, too."""
    return (*HALVES, torch.float32) if kind == "q5_1" else HALVES


def adapters() -> None:
    """Launch the kernels of low-rank adapters, with sizes that fit their tiles or not."""
    for dtype, (ranks, k, columns) in itertools.product(HALVES, ((48, 4096, 6144), (24, 100, 200))):
        places = lora_places(ranks, k, columns, dtype)
        units = StepUnits.allocate(2, 32, torch.device("cpu"))
        x, t, out = (empty(32, width, dtype=dtype) for width in (k, ranks, columns))
        add_adapters(out, x, t, places, units)


def lora_places(ranks: int, k: int, columns: int, dtype: torch.dtype) -> LoraPlaces:
    """Return two places of adapters."""
    a, b = empty(2, ranks, k, dtype=dtype), empty(2, columns, ranks, dtype=dtype)
    return LoraPlaces(a, b, empty(2, ranks, dtype=torch.float32), empty(2, dtype=torch.int32))


def adapters_of_experts(facts: dict[str, Any], key: str) -> None:
    """Launch the kernels of adapters of experts, with small and large blocks."""
    experts, top_k, hidden, inner, ranks = 8, 2, 1024, 768, 32
    for dtype, rows in (*((half, 128) for half in HALVES), (HALVES[0], 16), (torch.float32, 16)):
        config = product_entry(key, rows, dtype)
        facts |= {"dtype": str(dtype), "rows": rows} | asdict(config)
        pairs = room(8 * top_k, experts)
        step = StepUnits.allocate(2, 8, torch.device("cpu"))
        gate_up = empty(experts, 2 * inner, hidden, dtype=dtype)
        up, last = gate_up[:, :inner].contiguous(), empty(experts, hidden, inner, dtype=dtype)
        x, activated = empty(8, hidden, dtype=dtype), empty(8 * top_k, inner, dtype=dtype)
        of_weights = []
        for weight in (gate_up, up, last):
            columns, k = weight.shape[1:]
            places = ExpertPlaces(
                empty(2, experts, ranks, k, dtype=dtype),
                empty(2, experts, columns, ranks, dtype=dtype),
                empty(2, experts, ranks, dtype=torch.float32),
                empty(2, experts, dtype=torch.int32),
            )
            t = empty(8 * top_k, ranks, dtype=dtype)
            of_weights.append(PairAdapters(t, places, step, top_k))
        for name, weight, own in (
            ("silu", gate_up, of_weights[0]),
            ("gpt_oss", gate_up, of_weights[0]),
            ("relu_squared", up, of_weights[1]),
        ):
            shrink_pairs(own, x, pairs, config.block_m, True)
            gate_and_up(activated, x, weight, None, name, top_k, pairs, config, own)
        shrink_pairs(of_weights[2], activated, pairs, config.block_m, False)
        out = empty(8 * top_k, hidden, dtype=dtype)
        down(out, activated, last, None, top_k, pairs, config, of_weights[2])
    facts.clear()


def sampler() -> None:
    ids, tokens = empty(4, dtype=torch.int32), empty(4, dtype=torch.int64)
    logits = empty(4, VOCAB_SIZE, dtype=torch.float32)
    scratch = SamplingScratch.allocate(4, VOCAB_SIZE, "cpu")
    columns = SamplingColumns.greedy(4, "cpu")
    counts = empty(4, VOCAB_SIZE, dtype=torch.int32)
    masks = TokenMasks(empty(4, VOCAB_SIZE // 32, dtype=torch.int32), ids)
    sample(tokens, logits, ids, tokens, columns, scratch)
    sample(tokens, logits.bfloat16(), ids, tokens, columns, scratch, counts, masks, True)
    drafted = DraftedTokens(tokens, ids)
    sample(tokens, logits, ids, tokens, columns, scratch, counts, drafted=drafted)
    score(Scores.allocate(4, 20, "cpu"), logits, tokens, ids, scratch)
    count_tokens(counts, ids, tokens)
    count_tokens(counts, ids, tokens, is_prompt=True)
    add_biases(logits, ids, tokens, logits[0, :4])


ENCODER = (12, 12, 64)
"""The query heads, the kv heads and the head size of BERT and ModernBERT."""
SHAPES = (
    (32, 8, 128), (32, 8, 64), (16, 8, 256), (28, 4, 128), (32, 8, 80), (16, 2, 512), ENCODER,
    (64, 8, 192),
)  # fmt: skip
"""Query heads, kv heads, and the head size."""
VALUE_DIMS = {192: 128}
"""For the sizes of keys that are wider than values, of MiMo-V2-Flash, the size of these."""


@dataclass(frozen=True)
class AttentionVariant:
    """A launch of attention; see `AttentionLaunches.choose` for those that the engine makes."""

    max_query_len: int
    num_splits: int
    window: int | None
    masks_all: bool
    has_cap: bool = False
    has_sinks: bool = False
    has_ends: bool = False
    has_biases: bool = False
    has_own_biases: bool = False


OPTIONS: tuple[tuple[int, int | None], ...] = ((1, None), (4, None), (1, 1024), (4, 1024))
"""Splits and window."""
DECODE = AttentionVariant(1, 1, None, True)
SPLIT_DECODE = AttentionVariant(1, 4, None, True)
WINDOW_DECODE = AttentionVariant(1, 1, 1024, True)
PREFILL = AttentionVariant(512, 1, None, False)
BOTH_WAYS = AttentionVariant(512, 1, None, False, has_ends=True)
VARIANTS = (
    *(AttentionVariant(1, splits, window, True) for splits, window in OPTIONS),
    *(AttentionVariant(512, splits, window, False) for splits, window in OPTIONS),
    AttentionVariant(512, 1, None, True),
    *(AttentionVariant(512, splits, window, False, has_ends=True) for splits, window in OPTIONS),
    AttentionVariant(1, 1, None, True, has_ends=True),
    AttentionVariant(512, 1, 65, True, has_ends=True),
    *(
        AttentionVariant(*sizes, 128, sizes[0] == 1, has_cap, not has_cap)
        for sizes in ((1, 4), (512, 1))
        for has_cap in (True, False)
    ),
)
OTHER_DECODES = (
    *itertools.product(((16, 2, 256), (8, 2, 256)), ("gates",), (1, 2)),
    *itertools.product(((32, 32, 128), (40, 8, 128)), ("row norms",), (1, 2, 5, 9)),
    *itertools.product(((32, 8, 128),), ("norms behind", "growth"), (1, 5)),
    *itertools.product(((96, 8, 128), (32, 8, 160)), ("norms of each",), (1, 2)),
    *itertools.product(((64, 64, 64),), ("norms with a bias",), (1, 2)),
    *itertools.product(((8, 1, 256), (8, 1, 512)), ("no keys",), (1, 2)),
    *itertools.product(((8, 1, 512), (64, 4, 192)), ("",), (1, 2)),
    ((20, 20, 64), "others alone", 1),
)
"""Decodes with gates, of Qwen3-Next-80B-A3B and Qwen3.5-0.8B, with norms of all heads side by side,
of OLMo-2-7B and 32B, with norms behind the rotation, of Hunyuan-A13B, with LayerNorms of each head,
of Command R+ and StableLM-2-12B, with biases, too, of Persimmon-8B, with queries that grow, of
Ministral-3-8B, of Gemma 4 E2B, of layers that read the keys and values of another one and of those
with heads of 512, of MiMo-V2-Flash, and of Whisper large, of an encoder's: heads, feature, tokens
of a request."""
FLOAT8_VARIANTS = (DECODE, SPLIT_DECODE, PREFILL, replace(PREFILL, window=1024), BOTH_WAYS)


def halves(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of a cache, as the engine lays them out."""
    value_dim = VALUE_DIMS.get(dim, dim)
    if value_dim == dim:
        keys, values = empty(2, 8, 16, kv_heads, dim, dtype=dtype)
        return keys, values
    both = empty(8, 16, kv_heads, dim + value_dim, dtype=dtype)
    return both[..., :dim], both[..., dim:]


def attention(
    facts: dict[str, Any],
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    variant: AttentionVariant,
    has_float8: bool = False,
) -> None:
    """Launch the entry of a table for heads of these numbers and this size, with keys and values in
    the dtype or in FP8."""
    heads, kv_heads, dim = shape
    per_kv, splits = heads // kv_heads, variant.num_splits
    config = table_entry(key, dim, per_kv, variant.max_query_len, dtype)
    facts |= {"dtype": str(dtype), "shape": shape} | asdict(variant) | asdict(config)
    facts["has_float8"] = has_float8
    kept = torch.float8_e4m3fn if has_float8 else dtype
    cache, query = halves(kv_heads, dim, kept), empty(4, heads, dim, dtype=dtype)
    out = empty(4, heads, cache[1].shape[3], dtype=dtype)
    table, starts = empty(2, 8, dtype=torch.int32), empty(3, dtype=torch.int32)
    ends = empty(4, dtype=torch.int32) if variant.has_ends else None
    biases = empty(heads, 1023, dtype=torch.float32) if variant.has_biases else None
    if variant.has_own_biases:
        biases = empty(4, heads, 512, dtype=torch.float32)
    scratch = AttentionScratch.allocate(4, heads, splits, out.shape[2], torch.device("cpu"))
    paged_attention(
        out, query, cache[0], cache[1], table, starts, starts[1:], config,
        0.1, variant.window, 30.0 if variant.has_cap else None,
        query[0, :, 0].clone() if variant.has_sinks else None, splits, scratch, variant.masks_all,
        ends, biases,
    )  # fmt: skip


def decodes(
    facts: dict[str, Any], key: str, capability: int, takes_all: bool, has_float8: bool = False
) -> None:
    """Launch attention of decodes, split and not, of one token of each request and of several, and,
    as the engine does with one token from 9.0 on, dependent on the launch before; or only split
    ones of one shape. Keys and values are in bfloat16 or in FP8. Some have gates, and some norms of
    all heads side by side."""
    shapes, splits_of_all = (SHAPES[:4], (1, 8)) if takes_all else (SHAPES[1:2], (8,))
    counts = (1, 2, 5, 9) if takes_all else (1, 5)
    kept = torch.float8_e4m3fn if has_float8 else torch.bfloat16
    cases = [*itertools.product(shapes, ("",), counts)]
    if takes_all and not has_float8:
        cases += OTHER_DECODES
    for (shape, feature, count), splits in itertools.product(cases, splits_of_all):
        heads, kv_heads, dim = shape
        sizes = heads // kv_heads, count, torch.bfloat16, splits > 1
        entry = table_entry if count == 1 else verify_entry
        config = entry(key, dim, *sizes)
        if config is None:
            continue
        facts |= {"shape": shape, "splits": splits, "tokens": count} | asdict(config)
        facts |= {"has_float8": has_float8, "feature": feature}
        value_dim, angles, norms = VALUE_DIMS.get(dim, dim), empty(4, dim), None
        width = (heads + kv_heads) * dim
        every = empty(4, width + kv_heads * value_dim)
        rows = every[:, :width].unflatten(1, (-1, dim))
        values: torch.Tensor | None = every[:, width:].unflatten(1, (-1, value_dim))
        if feature in ("no keys", "others alone"):
            rows, values = rows[:, :heads], None
        elif feature:
            has_own, each = feature in ("row norms", "norms of each"), feature == "norms of each"
            counts_of_heads = (heads, kv_heads) if has_own else (1, 1)
            of_queries, of_keys = (empty(number * dim) for number in counts_of_heads)
            if each:
                of_queries, of_keys = of_queries.view(-1, dim), of_keys.view(-1, dim)
            is_behind = feature == "norms behind"
            norms = HeadNorms(of_queries, of_keys, 1e-6, is_behind=is_behind, is_centered=each)
            if feature == "norms with a bias":
                both = empty(2, dim)
                norms = HeadNorms(both, both, 1e-6, is_centered=True, has_bias=True)
        cache = halves(kv_heads, dim, kept)
        table, starts = empty(4, 8, dtype=torch.int32), empty(5, dtype=torch.int32)
        scratch = AttentionScratch.allocate(4, heads, splits, value_dim, torch.device("cpu"))
        is_dependent, ahead, is_split = capability >= 90, None, splits > 1
        if is_dependent and is_split and not feature:
            ahead = WeightsAhead.of(2**24, empty(1024, heads * value_dim), empty(8192, 1024), True)
        facts["asks_ahead"] = ahead is not None
        decode_attention(
            empty(4, heads, value_dim), rows, *cache, table, starts, starts[1:],
            empty(4, dtype=torch.int64), config, 0.1, angles, angles, norms, num_splits=splits,
            scratch=scratch, max_tokens=count, loads_first=is_split and (count > 1 or is_dependent),
            is_dependent=is_dependent, ahead=ahead,
            gates=empty(4, heads, dim) if feature == "gates" else None,
            growth=QueryGrowth(0.1, 16384) if feature == "growth" else None,
            sees_new=feature != "others alone",
            values=values,
        )  # fmt: skip
    facts.clear()


def limited_decodes(facts: dict[str, Any], parts: list[str]) -> None:
    """Launch attention of decodes whose threads have few registers, with heads of 128 and 64."""
    for dim, most in itertools.product((128, 64), (96, 128) if "limited-decodes" in parts else ()):
        config = AttentionConfig(16, 64, num_warps=dim // 32, num_stages=3, max_registers=most)
        facts |= {"shape": (32, 8, dim)} | asdict(config)
        table, starts = empty(4, 8, dtype=torch.int32), empty(5, dtype=torch.int32)
        cache, angles = empty(2, 8, 16, 8, dim), empty(4, dim)
        decode_attention(
            empty(4, 32, dim), empty(4, 48, dim), cache[0], cache[1], table, starts, starts[1:],
            empty(4, dtype=torch.int64), config, 0.1, angles, angles,
        )  # fmt: skip
    facts.clear()


def float8(facts: dict[str, Any], key: str, capability: int, parts: list[str]) -> None:
    """Launch the kernels that read and write FP8 keys and values: some, or all, of which only the
    decodes for 10.0, as of other attention."""
    if "some-float8" in parts:
        float8_writes()
        attention(facts, key, torch.bfloat16, SHAPES[0], PREFILL, has_float8=True)
        facts.clear()
        decodes(facts, key, capability, False, has_float8=True)
    if "all-float8" in parts:
        float8_writes()
        halves = ((torch.bfloat16, SHAPES), (torch.float16, SHAPES[:1]))
        for dtype, shapes in halves if capability < 100 else ():
            for shape, variant in itertools.product(shapes, FLOAT8_VARIANTS):
                attention(facts, key, dtype, shape, variant, has_float8=True)
        facts.clear()
        decodes(facts, key, capability, True, has_float8=True)


def float8_writes() -> None:
    """Launch the write of keys and values in FP8."""
    cache, angles = empty(2, 8, 16, 8, 128, dtype=torch.float8_e4m3fn), empty(4, 1, 128)
    heads, slots = empty(4, 48, 128), empty(4, dtype=torch.int64)
    rope_and_write(heads[:, :32], cache[0], cache[1], heads, angles, angles, slots)


def single_rows(facts: dict[str, Any], capability: int, takes_all: bool) -> None:
    """Launch the products of one row of Llama-3.2-1B, or also of Llama-3.1-8B."""
    for hidden, inner in ((2048, 8192), (4096, 14_336))[: 2 if takes_all else 1]:
        norm = RowNorm(empty(hidden), 1e-5, 0.0)
        for n, k, options in (
            (hidden + hidden // 2, hidden, {"norm": norm}),
            (hidden, hidden, {"adds": True}),
            (inner, hidden, {"norm": norm, "activation": Activation("silu", True)}),
            (hidden, inner, {"adds": True}),
            (VOCAB_SIZE, hidden, {}),
        ):
            rows = 2 * n if "activation" in options else n
            config = single_row_config(rows, k)
            facts |= {"n": n, "k": k} | asdict(config)
            multiply_row(
                empty(1, n),
                empty(1, k),
                torch.empty(rows, k, dtype=torch.bfloat16),
                config,
                is_dependent=capability >= 90,
                **options,
            )
    facts.clear()


def packed_rows(facts: dict[str, Any], capability: int, parts: list[str]) -> None:
    """Launch the products of one row with packed matrices of all kinds, or of one, gated and
    not."""
    takes_all = "all-packed-rows" in parts
    kinds = FORMATS if takes_all else ("int4",) if "some-decodes" in parts else ()
    for kind, k in itertools.product(kinds, (2048, 14_336)[: 2 if takes_all else 1]):
        facts |= {"packed": kind, "k": k} | asdict(packed_row_config())
        matrix = FORMATS[kind].make(
            (2048, k), torch.bfloat16, lambda size, dtype: torch.empty(size, dtype=dtype)
        )
        rows = PackedRows.of(matrix.kind, matrix.integers, matrix.scales, k)
        norm = RowNorm(empty(k), 1e-5, 0.0)
        config, is_dependent = config_of(rows, torch.device("cpu")), capability >= 90
        multiply_row(
            empty(1, 2048), empty(1, k), rows, config, adds=True, is_dependent=is_dependent
        )
        multiply_row(
            empty(1, 1024), empty(1, k), rows, config, None, norm, Activation("silu", True),
            is_dependent=is_dependent,
        )  # fmt: skip
    facts.clear()


def few_rows(facts: dict[str, Any], capability: int, parts: list[str]) -> None:
    """Launch the products of eight rows of Llama-3.2-1B, or all of them: also of Llama-3.1-8B, with
    packed matrices, adapters, a LayerNorm and other dtypes."""
    takes_all = "all-few-rows" in parts
    if not takes_all and "some-decodes" not in parts:
        return
    for hidden, inner in ((2048, 8192), (4096, 14_336))[: 2 if takes_all else 1]:
        norm = RowNorm(empty(hidden), 1e-5)
        for n, k, options in (
            (hidden, inner, {"adds": True}),
            (inner, hidden, {"norm": norm, "activation": Activation("silu", True)}),
            (hidden + hidden // 2, hidden, {"norm": norm}),
            (VOCAB_SIZE, hidden, {}),
        )[: 4 if takes_all else 2]:
            weight = torch.empty(2 * n if "activation" in options else n, k, dtype=torch.bfloat16)
            launch_few_rows(facts, weight, n, capability, **options)
    kinds = FORMATS if takes_all else ("int4",)
    for kind in kinds:
        matrix = FORMATS[kind].make(
            (2048, 2048), torch.bfloat16, lambda size, dtype: torch.empty(size, dtype=dtype)
        )
        packed = PackedRows.of(matrix.kind, matrix.integers, matrix.scales, 2048)
        facts |= {"packed": kind}
        launch_few_rows(facts, packed, 2048, capability, adds=True)
    if takes_all:
        variants_of_few_rows(facts, capability)


def many_rows(facts: dict[str, Any], capability: int, parts: list[str]) -> None:
    """Launch two products of 256 rows of Llama-3.1-8B, or all of them, also of Llama-3.2-1B, with a
    bias and in float16."""
    takes_all = "all-many-rows" in parts
    if capability < 90 or (not takes_all and "some-decodes" not in parts):
        return
    silu = Activation("silu", True)
    for hidden, inner in ((4096, 14_336), (2048, 8192))[: 2 if takes_all else 1]:
        for n, k, options in (
            (inner, hidden, {"activation": silu}),
            (hidden, inner, {}),
            (hidden + hidden // 2, hidden, {"bias": empty(hidden + hidden // 2)}),
            (VOCAB_SIZE, hidden, {}),
        )[: 4 if takes_all else 2]:
            launch_many_rows(facts, n, k, capability, torch.bfloat16, **options)
    if takes_all:
        launch_many_rows(facts, 4096, 4096, capability, torch.float16, activation=silu)


def launch_many_rows(
    facts: dict[str, Any], n: int, k: int, capability: int, dtype: torch.dtype, **options: Any
) -> None:
    weight = torch.empty(2 * n if "activation" in options else n, k, dtype=dtype)
    config = many_rows_config(len(weight), f"sm{capability}")
    facts |= {"dtype": str(dtype), "n": n, "k": k, "is_gated": "activation" in options}
    facts |= asdict(config)
    out, x = empty(256, n, dtype=dtype), empty(256, k, dtype=dtype)
    scratch = many.ManyRowsScratch.allocate(config, 132, "meta")
    many.multiply_rows(
        out, x, weight, config, scratch, 132, is_dependent=capability >= 90, **options
    )
    facts.clear()


def variants_of_few_rows(facts: dict[str, Any], capability: int) -> None:
    for dtype in (*HALVES, torch.float32):
        own = empty(2048, dtype=dtype)
        weight, places = empty(2048, 2048, dtype=dtype), lora_places(32, 2048, 2048, dtype)
        units = StepUnits.allocate(2, 8, torch.device("cpu"))
        counters = torch.zeros(2, dtype=torch.int32)
        adapters = RowAdapters(empty(8, 32, dtype=dtype), counters, places, units)
        for has_mean in (False, True):
            before = RowNorm(own, 1e-5, has_mean=has_mean, bias=own if has_mean else None)
            options = {"norm": before, "bias": own}
            launch_few_rows(facts, weight, 2048, capability, dtype, **options)
        launch_few_rows(facts, weight, 2048, capability, dtype, adapters=adapters)
        for offset in (0.0, 1.0):
            norm = RowNorm(own, 1e-5, offset)
            added = AddedNorm(empty(8, 2048, dtype=dtype), norm, 1.0, empty(8, 2048, dtype=dtype))
            launch_few_rows(facts, weight, 2048, capability, dtype, norm=norm, added=added)
        # The gate of a layer's own input, behind a layer with a factor (Gemma 4).
        own_input = empty(8, 30 * 256, dtype=dtype)[:, :256]
        added = replace(added, factor=empty(1, dtype=dtype))
        options = {"added": added, "activation": Activation("gelu_tanh", False)}
        gate = empty(256, 2048, dtype=dtype)
        launch_few_rows(facts, gate, 256, capability, dtype, factors=own_input, **options)


def launch_few_rows(
    facts: dict[str, Any],
    weight: Rows,
    n: int,
    capability: int,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    is_packed, key = isinstance(weight, PackedRows), f"sm{capability}"
    config = few_rows_config(weight.shape[0], dtype, is_packed, key)
    if "added" in options:
        config = replace(config, num_stages=2)
    facts |= {"dtype": str(dtype), "n": n, "k": weight.shape[1]} | asdict(config)
    out, x = empty(8, n, dtype=dtype), empty(8, weight.shape[1], dtype=dtype)
    multiply_rows(out, x, weight, config, is_dependent=capability >= 90, **options)
    facts.clear()


def decoders(facts: dict[str, Any], capability: int, parts: list[str]) -> None:
    """Launch the layers of Llama-3.2-1B and of models of other sizes: with heads of 128, with norms
    and windows, with drafted tokens, FP8 keys and values, and in other dtypes."""
    small = DecoderShape(2048, 32, 8, 64, 8192, 64, rotates=(True,), windows=(None,))
    large = replace(small, hidden=4096, dim=128, inner=14_336, rotary_dim=128)
    normed = replace(large, hidden=2048, heads=16, inner=6144, has_norms=True, windows=(1024,))
    posts = replace(
        small, heads=4, kv_heads=1, dim=256, rotary_dim=256, has_norms=True, has_posts=True,
        offset=1.0, windows=(512,), activation=Activation("gelu_tanh", True),
    )  # fmt: skip
    cases: list[tuple[DecoderShape, torch.dtype, int, torch.dtype | None]] = [
        *((shape, torch.bfloat16, 1, None) for shape in (small, large, normed)),
        (replace(small, has_biases=True), torch.float16, 1, None),
        (posts, torch.bfloat16, 1, None),
        *((shape, torch.bfloat16, 5, None) for shape in (small, large)),
        (large, torch.bfloat16, 1, torch.float8_e4m3fn),
        (small, torch.float32, 1, None),
    ]
    if "all-decoders" not in parts:
        cases = cases[:1] if "some-decoders" in parts else []
    for shape, dtype, count, kept in cases:
        launch_decoder(facts, capability, shape, dtype, count, kept)


def launch_decoder(
    facts: dict[str, Any],
    capability: int,
    shape: DecoderShape,
    dtype: torch.dtype,
    count: int,
    kept: torch.dtype | None,
) -> None:
    key, splits, per_kv = f"sm{capability}", 16, shape.heads // shape.kv_heads
    tile = decoder_config(shape.hidden, dtype, key)
    sizes = key, shape.dim, per_kv, count, dtype, True
    attention = table_entry(*sizes) if count == 1 else verify_entry(*sizes)
    assert attention is not None
    attention = attention_tile(attention, shape.dim)

    def make(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype)

    case = DecoderCase(shape, make, [64], [count], 16, kept)
    x = make(count, shape.hidden)
    scratch = AttentionScratch.allocate(count, shape.heads, splits, shape.dim, x.device)
    facts |= {"dtype": str(dtype), "hidden": shape.hidden, "dim": shape.dim, "tokens": count}
    facts |= asdict(tile) | {"asks_cache": capability >= 90, "tile": attention.tile}
    facts["has_float8"] = kept is not None
    run_layers(
        x, case.decoder(case.layers), case.memory(x), case.starts, case.contexts, tile, attention,
        132, splits, scratch, count, capability >= 90,
    )  # fmt: skip
    facts.clear()


WIDTHS_OF_LATENTS = {16: (128, 128), 20: (192, 256), 128: (128, 128)}
"""By the number of heads: the width of what does not rotate of a query's head, and of a value."""


def latents(facts: dict[str, Any], key: str, parts: list[str], capability: int) -> None:
    """Launch latent attention, in the model's dtype and in FP8."""
    for part in {"some-latents", "all-latents"} & set(parts):
        launch_latents(facts, key, part == "all-latents", capability, False)
    for part in {"some-float8", "all-float8"} & set(parts):
        launch_latents(facts, key, part == "all-float8", capability, True)


def launch_latents(
    facts: dict[str, Any], key: str, takes_all: bool, capability: int, has_float8: bool
) -> None:
    """Launch latent attention with the shapes of DeepSeek-V2-Lite, or also with those of
    GLM-4.7-Flash and DeepSeek-V3, for decodes and prompts."""
    dtypes = (*HALVES, torch.float32) if takes_all and not has_float8 else HALVES[:1]
    table, starts = empty(2, 8, dtype=torch.int32), empty(3, dtype=torch.int32)
    for dtype, heads in itertools.product(dtypes, (16, 20, 128) if takes_all else (16,)):
        facts |= {"dtype": str(dtype), "heads": heads, "has_float8": has_float8}
        kept = torch.float8_e4m3fn if has_float8 else dtype
        cache, query = empty(8, 16, 576, dtype=kept), empty(4, heads, 512, dtype=dtype)
        rope = empty(4, heads, 64, dtype=dtype)
        slots, angles = empty(4, dtype=torch.int64), empty(4, 64, dtype=dtype)
        x, weight = empty(4, 576, dtype=dtype), empty(512, dtype=dtype)
        write_latents(cache, x, weight, 1e-6, angles, angles, slots, True)
        nope, value = WIDTHS_OF_LATENTS[heads]
        wide, key_up = (
            empty(*shape, dtype=dtype) for shape in ((4, heads, nope + 64), (heads, 512, nope))
        )
        value_up, out = (
            empty(*shape, dtype=dtype) for shape in ((heads, value, 512), (4, heads * value))
        )
        written = cache, x, weight, 1e-6, angles, angles, slots, True
        facts["is_dependent"] = is_dependent = capability >= 90
        absorb_queries(query, wide, key_up, *written, is_dependent)
        for splits in (1, 4, 32):
            facts["splits"] = splits
            scratch = AttentionScratch.allocate(4, heads, splits, 512, torch.device("cpu"))
            parts_of = starts, splits, scratch
            project_values(out, query, value_up, *parts_of, is_dependent)
        facts.pop("splits")
        if not has_float8:
            indexers(facts, dtype, angles, slots)
            compressed(facts, key, dtype)
        growths = (None, QueryGrowth(0.1, 8192)) if takes_all else (None,)
        steps = (1, 1), (1, 4), (512, 1), (512, 4)
        for growth, (longest, splits) in itertools.product(growths, steps):
            config = latent_entry(key, heads, longest, dtype)
            facts |= {"splits": splits, "longest": longest} | asdict(config)
            facts["grows"] = growth is not None
            scratch = AttentionScratch.allocate(4, heads, splits, 512, torch.device("cpu"))
            operands = query, query.clone(), rope, cache, table, starts, starts[1:]
            paged_latent_attention(*operands, config, 0.1, splits, scratch, growth)
            if longest == 1:
                more = splits, scratch, growth, False, is_dependent
                attend_parts(*operands, config, 0.1, *more)
                if growth is None and not has_float8:
                    with_sinks = *more, empty(heads, dtype=torch.float32)
                    attend_parts(*operands, config, 0.1, *with_sinks)
                    paged_latent_attention(*operands, config, 0.1, splits, scratch, None, True)
        facts.clear()


def compressed(facts: dict[str, Any], key: str, dtype: torch.dtype) -> None:
    """Launch the compressed attention of DeepSeek-V4: windows, and entries of 4 tokens, which an
    indexer chooses, or of 128."""
    heads, tokens = 64, 4
    sizes = (tokens, heads, 512), (tokens, 64), (tokens, 2560), (512,), (8, 16, 2560), (8, 4, 512)
    query, angles, x, weight, parts, made = (empty(*size, dtype=dtype) for size in sizes)
    keys, slots = empty(8, 16, 512, dtype=dtype), empty(tokens, dtype=torch.int64)
    sinks, scores = (empty(*size, dtype=torch.float32) for size in ((heads,), (4, 4096)))
    table, listed, starts, lens = (
        integers(*size) for size in ((2, 64), (tokens, 640), (tokens + 1,), (tokens,))
    )
    before = dict(facts)
    facts["heads"] = heads
    rotate_heads(query, angles, angles, 1e-6)
    rotate_heads(query, angles, angles, is_back=True)
    store_keys(keys, x[:, :512], weight, 1e-6, angles, angles, slots)
    store_rows(parts, x, slots)
    own, of_requests = CacheRows(parts, table), RequestTables(table, starts[:3], lens[:2])
    for rate, rows in ((4, made), (4, made[..., :128]), (128, made[:, :1])):
        overlaps, dim = rate == 4, rows.shape[2]
        bias = empty(rate, dim * (1 + overlaps), dtype=torch.float32)
        target, first = CacheRows(rows, table), 2048 if dim == 128 else 0
        rest = bias, weight[:dim], 1e-6, angles, angles, *of_requests[1:]
        compress(target, own, Made(rate, overlaps, first), *rest)
    scored = Scored(query[..., :128].contiguous(), x[:, :heads], made[..., :128], angles, angles)
    pages, out = Pages(0, 64, 4), (listed, starts, lens, scores)
    facts["block_m"] = heads
    for entries in (Entries(pages, table, 4, 512, scored), Entries(pages, table, 128, 512), None):
        list_keys(*out, of_requests, pages, 128, 16, entries)
    for longest, splits in ((1, 1), (1, 4)):
        config = latent_entry(key, heads, longest, dtype)
        facts |= {"splits": splits, "longest": longest, "has_parts": False} | asdict(config)
        scratch = AttentionScratch.allocate(tokens, heads, splits, 512, torch.device("cpu"))
        flat = parts.view(-1).unfold(0, 512, 128)[:, None]
        paged_latent_attention(
            query, query, query[..., :0], flat, listed, starts, lens, config, 0.1, splits, scratch,
            None, True, sinks,
        )  # fmt: skip
    facts.clear()
    facts |= before


def indexers(
    facts: dict[str, Any], dtype: torch.dtype, angles: torch.Tensor, slots: torch.Tensor
) -> None:
    """Launch the kernels of the indexers of DeepSeek-V3.2, of GLM-5 and of MiniMax M3."""
    cache, key = empty(8, 64, 128, dtype=dtype), empty(4, 128, dtype=dtype)
    chosen, starts, lens, table, begins, contexts = (
        empty(*shape, dtype=torch.int32) for shape in ((4, 2048), (5,), (4,), (2, 64), (3,), (2,))
    )
    scores = empty(4, 4096, dtype=torch.float32)
    for heads, interleaved in ((64, False), (32, True)):
        store_index_keys(cache, key, key[0], key[1], 1e-6, angles, angles, slots, interleaved)
        facts["block_m"] = heads
        query, weights = empty(4, heads, 128, dtype=dtype), empty(4, heads, dtype=dtype)
        choose_tokens(
            chosen, starts, lens, query, weights, cache, angles, angles, table, begins, contexts,
            scores, interleaved,
        )  # fmt: skip
        facts.pop("block_m")
    blocks, scores = empty(4, 4, 32, dtype=torch.int32), empty(4, 4, 32, dtype=torch.float32)
    facts["block_m"] = 16
    choose_blocks(
        blocks, starts, lens, query[:, :4], cache, table, begins, contexts, scores, 128, 1
    )
    facts.pop("block_m")


def main() -> None:
    capability, parts = int(sys.argv[1]), sys.argv[2:]
    facts: dict[str, Any] = {}
    compile_instead_of_launching(capability, facts, "some-rows" in parts)
    key = f"sm{capability}"
    if {"rows", "some-rows"} & set(parts):
        rows(capability)
        delta_nets(facts, capability)
        mambas(facts, capability)
        short_convolutions(facts, capability)
        step()
        sampler()
        adapters()
        adapters_of_experts(facts, key)
        meetings()
    mixtures(facts, key, capability, parts)
    latents(facts, key, parts, capability)
    for part in {"some-decodes", "decodes"} & set(parts):
        decodes(facts, key, capability, part == "decodes")
        single_rows(facts, capability, part == "decodes")
    limited_decodes(facts, parts)
    float8(facts, key, capability, parts)
    packed_rows(facts, capability, parts)
    few_rows(facts, capability, parts)
    many_rows(facts, capability, parts)
    decoders(facts, capability, parts)
    chosen = [("int4", torch.bfloat16)] if "some-packed" in parts else []
    kinds = [part.removeprefix("packed=") for part in parts if part.startswith("packed=")]
    chosen += [(kind, dtype) for kind in kinds for dtype in packed_dtypes(kind)]
    for kind, dtype in chosen:
        packed(facts, key, kind, dtype)
    if "some-attention" in parts:
        for variant in (SPLIT_DECODE, PREFILL):
            attention(facts, key, torch.bfloat16, SHAPES[0], variant)
    if "all-attention" in parts:
        for dtype in HALVES:
            for shape, variant in itertools.product(SHAPES, VARIANTS):
                attention(facts, key, dtype, shape, variant)
            attention(facts, key, dtype, ENCODER, replace(BOTH_WAYS, has_biases=True))
            attention(facts, key, dtype, ENCODER, replace(BOTH_WAYS, has_own_biases=True))
        for shape, variant in itertools.product(
            SHAPES[:2], (SPLIT_DECODE, DECODE, PREFILL, BOTH_WAYS)
        ):
            attention(facts, key, torch.float32, shape, variant)


if __name__ == "__main__":
    main()
