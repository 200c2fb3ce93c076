"""The tests of all layers of a decoder in one launch: it equals the launches that it replaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.decoder_case import DecoderCase, DecoderShape
from support.kernel_helpers import assert_close
from support.variants import slow

from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import AttentionConfig, attention_config
from shmllm_kernels.gpu.decode_attention import decode_attention
from shmllm_kernels.gpu.decoder import run_layers
from shmllm_kernels.gpu.few_rows import multiply_rows
from shmllm_kernels.gpu.norm import add_normed
from shmllm_kernels.gpu.row_configs import DecoderConfig, FewRowsConfig, decoder_config
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.reference.rope_write import HeadNorms

TILE = DecoderConfig(16, 16, 2, 2, 1, 0, 0)
ATTENTION = AttentionConfig(16, 16, 2, 2)
PLAIN = DecoderShape()
SHAPES = {
    "plain": PLAIN,
    "biases": replace(PLAIN, has_biases=True, activation=Activation("gelu_tanh", False)),
    "norms of heads": replace(PLAIN, has_norms=True, offset=1.0, rotary_dim=8),
    "a layer that rotates nothing": replace(PLAIN, rotates=(False, True), residual_scale=0.25),
    "a window": replace(PLAIN, windows=(3, None), interleaved=True),
    "norms behind blocks": replace(PLAIN, has_posts=True, soft_cap=2.0, residual_scale=0.5),
    "the same with an offset": replace(PLAIN, has_posts=True, offset=1.0),
    "no rotation": replace(PLAIN, rotates=(False, False), kv_heads=4),
    "whole iterations": replace(PLAIN, hidden=64, inner=128),
}
SOME = ("biases", "norms of heads", "a window", "the same with an offset")


def close(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return absolute and relative tolerances. The interpreter computes the same numbers in the
    same order; a GPU's compiler may fuse other operations."""
    if device.type == "cpu":
        return 0.0, 0.0
    return {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-3)}.get(dtype, (1e-1, 2e-2))


def launched(case, x, layers, attention=ATTENTION, splits=1, tile=TILE):
    """Compute a step with five launches a layer, and return the residual stream."""
    shape, numbers, stream = case.shape, case.shape.numbers, x.clone()
    few = FewRowsConfig(tile.block_n, tile.depth, tile.num_warps, tile.num_stages)
    heads, attended, activated = (
        x.new_empty(len(x), width) for width in (shape.width, shape.heads * shape.dim, shape.inner)
    )
    scratch = AttentionScratch.allocate(len(x), shape.heads, splits, shape.dim, x.device)
    tokens = len(x)

    def multiply_block(stream, x, weight, bias, post) -> None:
        scale, product = numbers.residual_scale, torch.empty_like(stream)
        if post is None:
            multiply_rows(stream, x, weight, few, bias, adds=True, scale=scale)
        else:
            multiply_rows(product, x, weight, few, bias)
            add_normed(product, stream, post, numbers.eps, scale, numbers.offset)

    for layer in layers:
        norms = None
        if layer.query_norm is not None:
            norms = HeadNorms(
                layer.query_norm, layer.key_norm, numbers.head_eps, numbers.head_offset
            )
        before = [
            RowNorm(weight, numbers.eps, numbers.offset)
            for weight in (layer.mixer_norm, layer.mlp_norm)
        ]
        multiply_rows(heads, stream, layer.qkv, few, layer.qkv_bias, before[0])
        decode_attention(
            attended.view(tokens, shape.heads, shape.dim),
            heads.view(tokens, -1, shape.dim),
            layer.keys,
            layer.values,
            layer.table,
            case.starts,
            case.contexts,
            layer.slots,
            attention,
            numbers.attention_scale,
            None if layer.cos is None else layer.cos[:tokens],
            None if layer.sin is None else layer.sin[:tokens],
            norms,
            shape.interleaved,
            window=layer.window,
            soft_cap=shape.soft_cap,
            num_splits=splits,
            scratch=scratch,
            max_tokens=int(case.starts.diff().max()),
            loads_first=True,
        )
        multiply_block(stream, attended, layer.output, layer.output_bias, layer.mixer_post)
        multiply_rows(
            activated, stream, layer.gate_up, few, layer.gate_up_bias, before[1], numbers.activation
        )
        multiply_block(stream, activated, layer.down, layer.down_bias, layer.mlp_post)
    return stream


class DecoderConformance:
    programs = (1, 2, 5)
    """The numbers of programs that a launch has."""

    def check(self, draw, dtype, case, programs, attention=ATTENTION, splits=1, tile=TILE):
        x = draw.normal(case.tokens, case.shape.hidden, dtype=dtype)
        wanted, own = case.copied(), case.copied()
        want = launched(case, x, wanted, attention, splits, tile)
        scratch = AttentionScratch.allocate(
            len(x), case.shape.heads, splits, case.shape.dim, x.device
        )
        layers, memory = case.decoder(own), case.memory(x, float("nan"))
        tolerances = close(dtype, x.device)
        for _ in range(2):  # the counters are 0 again
            got = x.clone()
            run_layers(
                got, layers, memory, case.starts, case.contexts, tile, attention, programs, splits,
                scratch, int(case.starts.diff().max()), x.device.type == "cuda",
            )  # fmt: skip
            assert_close(got, want, *tolerances)
            assert not memory.counters.any()
            assert not scratch.counters.any()
        for one, other in zip(own, wanted, strict=True):
            assert_close(one.keys.float(), other.keys.float(), *tolerances)
            assert_close(one.values.float(), other.values.float(), *tolerances)

    @staticmethod
    def case(draw, dtype, shape, contexts=(3, 9, 1), new=(1, 1, 1), **options):
        def make(*sizes, scale=1.0):
            return draw.normal(*sizes, dtype=dtype, scale=scale)

        return DecoderCase(shape, make, [*contexts], [*new], **options)

    @pytest.mark.parametrize("name", [name if name in SOME else slow(name) for name in SHAPES])
    def test_equals_the_launches_that_it_replaces(self, draw, dtype, name):
        case = self.case(draw, dtype, SHAPES[name])
        self.check(draw, dtype, case, self.programs[-1])

    def test_numbers_of_programs(self, draw, dtype):
        case = self.case(draw, dtype, PLAIN)
        for programs in self.programs[:-1]:
            self.check(draw, dtype, case, programs)

    @pytest.mark.parametrize("tokens", [1, slow(2), slow(7), 8])
    def test_numbers_of_tokens(self, draw, dtype, tokens):
        case = self.case(draw, dtype, PLAIN, range(1, tokens + 1), [1] * tokens)
        self.check(draw, dtype, case, self.programs[-1])

    @pytest.mark.parametrize("new", [(5, 1), (1, 0, 3, 4)])
    def test_drafted_tokens_and_padding(self, draw, dtype, new):
        case = self.case(draw, dtype, PLAIN, [9 if count else 0 for count in new], new)
        self.check(draw, dtype, case, self.programs[-1], replace(ATTENTION, block_m=32))

    def test_split_contexts(self, draw, dtype):
        case = self.case(draw, dtype, PLAIN, (150, 40, 33), block_size=16)
        self.check(draw, dtype, case, self.programs[-1], splits=4)

    def test_float8_keys_and_values(self, draw, dtype):
        case = self.case(draw, dtype, PLAIN, kept=torch.float8_e4m3fn)
        self.check(draw, dtype, case, self.programs[-1])

    @pytest.mark.slow
    def test_the_tile_of_production(self, draw, dtype):
        shape = replace(PLAIN, hidden=1024, dim=64, inner=256, rotary_dim=64)
        case = self.case(draw, dtype, shape, (40,), (1,))
        attention = attention_config(draw.device, 64, 2, 1, dtype, True)
        tile = decoder_config(1024, dtype)
        self.check(draw, dtype, case, self.programs[1], attention, tile=tile)
