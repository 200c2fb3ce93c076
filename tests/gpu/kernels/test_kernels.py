"""All Triton kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from conformance.altup_kernels import AltUpConformance
from conformance.attention_kernels import AttentionConformance
from conformance.attention_tiles import AttentionTilesConformance
from conformance.compression_kernels import CompressionConformance
from conformance.connection_kernels import ConnectionConformance
from conformance.decode_attention_kernel import DecodeAttentionConformance, Decodes, Step
from conformance.decoder_kernel import DecoderConformance
from conformance.delta_net_kernels import DeltaNetConformance
from conformance.expert_kernels import ExpertKernelsConformance
from conformance.expert_lora_kernels import ExpertLoraConformance
from conformance.expert_rows_kernel import ExpertRowsConformance
from conformance.few_mamba_kernels import FewMambaConformance
from conformance.few_recurrent_kernels import FewRecurrentConformance
from conformance.few_routing_kernel import FewRoutingConformance
from conformance.few_rows_kernel import FewRowsConformance, RowAdaptersConformance
from conformance.float8_kernels import (
    Float8AttentionConformance,
    Float8ConversionConformance,
    Float8DecodeConformance,
    Float8LatentConformance,
    Float8WriteConformance,
)
from conformance.group_kernels import GroupConformance
from conformance.identity_kernels import IdentityConformance
from conformance.indexer_kernels import BlockIndexerConformance, IndexerKernelsConformance
from conformance.latent_heads_kernels import LatentHeadsConformance
from conformance.latent_kernels import LatentKernelsConformance
from conformance.left_out_kernels import LeftOutConformance
from conformance.lora_kernels import LoraConformance
from conformance.mamba_kernels import MambaConformance
from conformance.many_rows_kernel import ManyRowsConformance
from conformance.packed_kernels import PackedKernelsConformance
from conformance.relation_kernels import RelationConformance
from conformance.rope_write_kernel import RopeWriteConformance
from conformance.row_kernels import RowKernelsConformance
from conformance.sampling_kernels import SamplingConformance, short_lists
from conformance.shared_expert_kernels import SharedExpertConformance
from conformance.short_convolution_kernels import ShortConvolutionConformance
from conformance.single_row_kernel import PackedRowConformance, SingleRowConformance
from conformance.step_kernels import StepConformance
from conformance.weights_ahead_kernel import WeightsAheadConformance

from shmllm_kernels.gpu.configs import has_dependent_launches, num_multiprocessors
from shmllm_kernels.gpu.many_rows import ManyRowsScratch, multiply_rows
from shmllm_kernels.gpu.row_configs import many_rows_config
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.weights_ahead import WeightsAhead

__all__ = ["short_lists"]


class TestAltUp(AltUpConformance):
    pass


class TestConnections(ConnectionConformance):
    pass


class TestAttention(AttentionConformance):
    pass


class TestAttentionTiles(AttentionTilesConformance):
    pass


class TestDecodeAttention(DecodeAttentionConformance):
    pass


class TestDecoder(DecoderConformance):
    programs = (1, 7, 66)


class TestDeltaNet(DeltaNetConformance):
    pass


class TestExpertKernels(ExpertKernelsConformance):
    pass


class TestExpertLora(ExpertLoraConformance):
    pass


class TestFewMamba(FewMambaConformance):
    pass


class TestFewRecurrent(FewRecurrentConformance):
    pass


class TestFewRouting(FewRoutingConformance):
    pass


class TestFewRows(FewRowsConformance):
    pass


class TestRowAdapters(RowAdaptersConformance):
    pass


class TestFloat8Attention(Float8AttentionConformance):
    pass


class TestFloat8Conversion(Float8ConversionConformance):
    pass


class TestFloat8Decodes(Float8DecodeConformance):
    pass


class TestFloat8Latents(Float8LatentConformance):
    pass


class TestFloat8Writes(Float8WriteConformance):
    pass


class TestShortConvolution(ShortConvolutionConformance):
    pass


class TestSingleRow(SingleRowConformance):
    pass


class TestExpertRows(ExpertRowsConformance):
    pass


class TestSharedExpert(SharedExpertConformance):
    pass


class TestGroup(GroupConformance):
    pass


class TestIdentities(IdentityConformance):
    pass


class TestLeftOut(LeftOutConformance):
    pass


class TestBlockIndexer(BlockIndexerConformance):
    pass


class TestCompression(CompressionConformance):
    pass


class TestIndexerKernels(IndexerKernelsConformance):
    pass


class TestLatentKernels(LatentKernelsConformance):
    pass


class TestLatentHeads(LatentHeadsConformance):
    pass


class TestLora(LoraConformance):
    pass


class TestMamba(MambaConformance):
    pass


class TestManyRows(ManyRowsConformance):
    def test_dependent_launches_share_scratch_memory(self, draw, device):
        """Products of an MLP with the tiles and the programs of production, one behind the other in
        a graph, have the bits that each has alone."""
        if not has_dependent_launches(device):
            pytest.skip("the kernel needs compute capability 9.0")
        hidden, inner, dtype = 4096, 7168, torch.bfloat16
        rows = [draw.normal(256, hidden, dtype=dtype) for _ in range(2)]
        gate_up = draw.normal(2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        down = draw.normal(hidden, inner, dtype=dtype, scale=inner**-0.5)
        tiles = [many_rows_config(len(weight), "sm90") for weight in (gate_up, down)]
        processors = num_multiprocessors(device)
        scratch = ManyRowsScratch.allocate(max(tiles, key=lambda t: t.elements), processors, device)
        activated = rows[0].new_empty(256, inner)

        def launch(out: torch.Tensor, x: torch.Tensor, is_dependent: bool) -> None:
            common = scratch, processors, None
            silu = Activation("silu", True)
            multiply_rows(activated, x, gate_up, tiles[0], *common, silu, is_dependent)
            multiply_rows(out, activated, down, tiles[1], *common, None, is_dependent)

        wanted = [torch.empty_like(x) for x in rows]
        for out, x in zip(wanted, rows, strict=True):
            launch(out, x, False)
            torch.cuda.synchronize()
        outs = [torch.empty_like(rows[0]) for _ in range(50)]
        launch(outs[0], rows[0], True)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number, out in enumerate(outs):
                launch(out, rows[number % 2], True)
        graph.replay()
        for number, out in enumerate(outs):
            assert torch.equal(out, wanted[number % 2]), number
        assert not scratch.counters.any()


class TestPackedRow(PackedRowConformance):
    pass


class TestPackedKernels(PackedKernelsConformance):
    pass


class TestRelations(RelationConformance):
    pass


class TestRopeWrite(RopeWriteConformance):
    pass


class TestRowKernels(RowKernelsConformance):
    pass


class TestSampling(SamplingConformance):
    pass


class TestStep(StepConformance):
    pass


class TestWeightsAhead(WeightsAheadConformance):
    @pytest.mark.parametrize("num_splits", [1, 4])
    @pytest.mark.parametrize("counts", [(1, 1), (3, 5)])
    def test_attention_that_asks_has_the_same_bits(self, draw, device, counts, num_splits):
        if not has_dependent_launches(device):
            pytest.skip("the cache cannot be asked before compute capability 9.0")
        sizes = {"dim": 64, "num_splits": num_splits, "padding": 1}
        case = Decodes((900, 33), counts, 5, loads_first=True, **sizes)
        step = Step(draw, torch.bfloat16, case)
        plain = step.run(is_dependent=True).clone()
        output, gate_up = (draw.normal(n, 1024, dtype=torch.bfloat16) for n in (512, 4096))
        ahead = WeightsAhead.of(4 * 2**20, output, gate_up, is_gated=True)
        asking = step.run(is_dependent=True, ahead=ahead)
        tokens = case.tokens
        assert torch.equal(plain[:tokens], asking[:tokens])
