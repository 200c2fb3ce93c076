"""Encoders on the fake GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.gpu_encoders import (
    SIZES,
    TEXTS,
    EncoderEngineConformance,
    EncoderFamiliesConformance,
    EncoderStepsConformance,
    _inference_mode,
    encoder_config,
    encoders,
    of_family,
    vectors_of,
)
from conformance.gpu_engine import Engine
from support.fake_gpu import FakeGpu
from support.gpu_steps import GpuSteps
from support.kernel_variants import seen_variants
from transformers import BertForSequenceClassification

from shmllm.params.pooling import PoolingType
from shmllm.wire.messages import Method
from shmllm.worker.gpu.heads import make_head

__all__ = ["_inference_mode", "encoders", "of_family"]


class TestEncoderSteps(EncoderStepsConformance):
    pass


class TestEncoderFamilies(EncoderFamiliesConformance):
    pass


class TestEncoderEngine(EncoderEngineConformance):
    def test_a_head_does_not_wait_for_other_work(self, gpu_device: FakeGpu, encoders: Any) -> None:
        _, directory = encoders(BertForSequenceClassification)
        head = make_head(GpuSteps(gpu_device, directory).model, gpu_device)
        assert head is not None
        event, x = gpu_device.event(), torch.zeros(1, device=gpu_device.torch_device)
        x.add_(1)
        event.record()
        assert head(torch.ones(1, SIZES["hidden_size"])).shape == (1, 3)
        assert not event.is_done()

    @pytest.mark.slow
    def test_nothing_is_compiled_while_serving(self, gpu_device: FakeGpu, encoders: Any) -> None:
        _, directory = encoders(BertForSequenceClassification)
        with seen_variants(lambda: gpu_device.is_capturing) as seen:
            engine = Engine(encoder_config(directory), gpu_device)
            assert not any(seen.values()), [variant for variant in seen if seen[variant]]
            before = set(seen)
            vectors_of(engine, type=PoolingType.CLS, uses_head=True)
            assert not set(seen) - before

    @pytest.mark.slow
    def test_the_cache_gets_the_memory_that_the_largest_step_leaves(
        self, gpu_device: FakeGpu, encoders: Any
    ) -> None:
        """No memory is for logits."""
        _, directory = encoders(BertForSequenceClassification)
        config = encoder_config(directory, "NONE")
        cache = replace(config.cache, memory_bytes=None, gpu_memory_utilization=0.001)
        engine = Engine(replace(config, cache=cache), gpu_device)
        assert engine.runner.info.num_blocks > 8
        assert not engine.runner._buffers.logits.numel()
        assert len(vectors_of(engine, type=PoolingType.MEAN)) == len(TEXTS)

    @pytest.mark.slow
    def test_an_encoder_sleeps(self, gpu_device: FakeGpu, encoders: Any) -> None:
        """Its head keeps its weights, and its graphs their addresses."""
        _, directory = encoders(BertForSequenceClassification)
        engine = Engine(encoder_config(directory), gpu_device)
        options: dict[str, Any] = {"type": PoolingType.CLS, "uses_head": True}
        before = vectors_of(engine, **options)
        engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
        engine.call(Method.WAKE_UP)
        for one, other in zip(vectors_of(engine, **options), before, strict=True):
            assert torch.equal(one, other)
