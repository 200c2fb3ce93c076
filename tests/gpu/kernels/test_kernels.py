"""All Triton kernels on a GPU."""

from __future__ import annotations

from conformance.attention_kernels import AttentionConformance
from conformance.attention_tiles import AttentionTilesConformance
from conformance.decode_attention_kernel import DecodeAttentionConformance
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
from conformance.packed_kernels import PackedKernelsConformance
from conformance.rope_write_kernel import RopeWriteConformance
from conformance.row_kernels import RowKernelsConformance
from conformance.sampling_kernels import SamplingConformance, short_lists
from conformance.single_row_kernel import PackedRowConformance, SingleRowConformance
from conformance.step_kernels import StepConformance

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
