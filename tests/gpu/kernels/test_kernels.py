"""All Triton kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from conformance.attention_kernels import AttentionConformance
from conformance.attention_tiles import AttentionTilesConformance
from conformance.decode_attention_kernel import DecodeAttentionConformance, Decodes, Step
from conformance.decoder_kernel import DecoderConformance
from conformance.delta_net_kernels import DeltaNetConformance
from conformance.expert_kernels import ExpertKernelsConformance
from conformance.expert_lora_kernels import ExpertLoraConformance
from conformance.expert_rows_kernel import ExpertRowsConformance
from conformance.few_rows_kernel import FewRowsConformance, RowAdaptersConformance
from conformance.float8_kernels import (
    Float8AttentionConformance,
    Float8ConversionConformance,
    Float8DecodeConformance,
    Float8WriteConformance,
)
from conformance.group_kernels import GroupConformance
from conformance.latent_kernels import LatentKernelsConformance
from conformance.lora_kernels import LoraConformance
from conformance.mamba_kernels import MambaConformance
from conformance.many_rows_kernel import ManyRowsConformance
from conformance.packed_kernels import PackedKernelsConformance
from conformance.rope_write_kernel import RopeWriteConformance
from conformance.row_kernels import RowKernelsConformance
from conformance.sampling_kernels import SamplingConformance, short_lists
from conformance.single_row_kernel import PackedRowConformance, SingleRowConformance
from conformance.step_kernels import StepConformance
from conformance.weights_ahead_kernel import WeightsAheadConformance

from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.weights_ahead import WeightsAhead

__all__ = ["short_lists"]


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


class TestFloat8Writes(Float8WriteConformance):
    pass


class TestSingleRow(SingleRowConformance):
    pass


class TestExpertRows(ExpertRowsConformance):
    pass


class TestGroup(GroupConformance):
    pass


class TestLatentKernels(LatentKernelsConformance):
    pass


class TestLora(LoraConformance):
    pass


class TestMamba(MambaConformance):
    pass


class TestManyRows(ManyRowsConformance):
    pass


class TestPackedRow(PackedRowConformance):
    pass


class TestPackedKernels(PackedKernelsConformance):
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
