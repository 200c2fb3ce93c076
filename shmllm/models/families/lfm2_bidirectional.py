"""LFM2 whose attention and convolutions see both sides: LFM2.5-Embedding, -ColBERT and -Encoder
(Liquid AI, "LFM2.5 Retrievers", 2026), and the last one with a classifier of personal data."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.families import lfm2
from shmllm.models.families.bert import with_labels
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.recurrent_specs import ShortConvolutionSpec
from shmllm.models.registry import Purpose, purpose_of

DETECTOR = "Lfm2BidirP2ForTokenClassification"
"""The architecture of LFM2.5-Encoder-350M-PII-Detector."""

named_weights = lfm2.named_weights


def configure(fields: Fields) -> ModelConfig:
    architecture = architecture_name(fields)
    is_classifier = purpose_of(architecture) is Purpose.CLASSIFY
    model = lfm2.configure(fields).with_mixers(_seeing_both_sides)
    model = replace(model, pooling="LAST" if is_classifier else "CLS")
    if architecture != DETECTOR:
        return model
    weights_of_its_training = ("class_weights",)
    return replace(model, head=with_labels(fields), skipped_prefixes=weights_of_its_training)


def _seeing_both_sides(mixer: MixerSpec) -> MixerSpec:
    """Returns attention to all tokens, or a convolution that reads ``taps // 2`` tokens before its
    own."""
    if isinstance(mixer, ShortConvolutionSpec):
        return replace(mixer, ahead=mixer.taps - 1 - mixer.taps // 2)
    assert isinstance(mixer, AttentionSpec), "LFM2 has no other mixers"
    return replace(mixer, ahead=None)
