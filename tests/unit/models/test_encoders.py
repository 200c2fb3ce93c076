"""Configurations of encoders, and of decoders that attend both ways: defaults, and what is refused.
tests/e2e/test_pooling_models.py compares what they compute with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.pooling_models import write_tokenizer

from shmllm.errors import EngineStartError
from shmllm.models.bias_specs import DistanceBiases, RelationBiases
from shmllm.models.config import ModelConfig
from shmllm.models.lengths import for_length
from shmllm.models.pooled import ModelUse, read_config
from shmllm.models.registry import Purpose, find_family, purpose_of
from shmllm.models.specs import MLPSpec

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}
ENCODERS = ["Bert", "Roberta", "XLMRoberta", "Camembert", "ModernBert", "MPNet", "Electra"]
ENCODERS += ["Deberta", "DebertaV2", "Albert", "Ernie"]
ROTARY = ["NomicBert", "Gte", "JinaEmbeddingsV3"]
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
NOMIC = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_inner": 96,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}
"""The fields of nomic-embed-text that none of transformers' take the place of."""


def read(directory: Path, architecture: str, **fields: Any) -> ModelConfig:
    config = {"architectures": [architecture]} | SIZES | fields
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory, ModelUse())


@pytest.mark.parametrize("family", ENCODERS + ROTARY)
def test_absent_fields_agree_with_transformers(family: str, tmp_path: Path) -> None:
    config = read(tmp_path, f"{family}Model")
    expected = getattr(transformers, f"{family}Config")()
    positions = config.first_position + config.max_position_embeddings
    assert positions == expected.max_position_embeddings
    eps = expected.norm_eps if family == "ModernBert" else expected.layer_norm_eps
    assert (config.norm.kind, config.norm.eps) == ("layer", eps)
    assert config.num_token_types == getattr(expected, "type_vocab_size", 0)
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MLPSpec)
    activation = getattr(expected, "hidden_act", "gelu")
    assert mlp.activation == {"gelu_new": "gelu_tanh"}.get(activation, activation)
    if family in ("Albert", "Electra"):
        assert config.embedding_size == expected.embedding_size
    assert (config.lm_head, config.head, config.pooling) == (False, None, "CLS")


def test_deberta_has_room_for_the_longest_request(tmp_path: Path) -> None:
    config = read(tmp_path, "DebertaV2Model", **DEBERTA, position_buckets=16)
    (biases,) = {each.biases for each in for_length(config, 60).attentions}
    assert isinstance(biases, RelationBiases)
    assert (biases.num_positions, biases.furthest) == (60, 512)


def test_absent_fields_of_the_privacy_filter(tmp_path: Path) -> None:
    name = "OpenAIPrivacyFilterForTokenClassification"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    config = read_config(tmp_path, ModelUse())
    expected = transformers.OpenAIPrivacyFilterConfig()
    (attention,), (experts,) = set(config.attentions), config.mixtures
    assert (config.hidden_size, config.num_layers) == (expected.hidden_size, 8)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (14, 2, 64)
    assert (attention.ahead, attention.window) == (expected.sliding_window, 129)
    assert (experts.num_experts, experts.top_k, experts.inner) == (128, 4, 640)
    assert config.head is not None
    assert config.head.labels == tuple(expected.id2label.values())


def test_absent_fields_of_eurobert(tmp_path: Path) -> None:
    config = read(tmp_path, "EuroBertModel", num_key_value_heads=None)
    expected = transformers.EuroBertConfig()
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert (config.norm.kind, config.norm.eps) == ("rms", expected.rms_norm_eps)
    assert config.attentions[0].num_kv_heads == config.attentions[0].num_heads
    assert config.ropes[0].theta == expected.rope_parameters["rope_theta"]


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_absent_fields_of_t5(family: str, tmp_path: Path) -> None:
    config = read(tmp_path, f"{family}EncoderModel", **T5)
    expected = getattr(transformers, f"{family}Config")()
    assert config.norm.eps == expected.layer_norm_epsilon
    assert config.attentions[0].head_dim == expected.d_kv
    biases = config.attentions[0].biases
    assert isinstance(biases, DistanceBiases)
    assert biases.num_buckets == expected.relative_attention_num_buckets
    assert biases.max_distance == expected.relative_attention_max_distance
    assert config.dense_mlps[0].gated == expected.is_gated_act
    assert (
        config.dense_mlps[0].activation
        == {"relu": "relu", "gelu_new": "gelu_tanh"}[expected.dense_act_fn]
    )


@pytest.mark.parametrize("family", ROTARY)
def test_absent_bases_agree_with_transformers(family: str, tmp_path: Path) -> None:
    (rope,) = read(tmp_path, f"{family}Model").ropes
    expected = getattr(transformers, f"{family}Config")()
    assert rope.theta == expected.rope_parameters["rope_theta"]


def test_absent_fields_of_modernbert(tmp_path: Path) -> None:
    expected = transformers.ModernBertConfig(num_hidden_layers=4)
    config = read(tmp_path, "ModernBertModel")
    for attention, kind in zip(config.attentions, expected.layer_types, strict=True):
        is_full = kind == "full_attention"
        assert attention.ahead == (None if is_full else expected.sliding_window)
        assert attention.window == (None if is_full else expected.sliding_window + 1)
        assert attention.rope is not None
        assert attention.rope.theta == expected.rope_parameters[kind]["rope_theta"]


def test_the_windows_of_embeddinggemma_agree_with_transformers(tmp_path: Path) -> None:
    fields = {"use_bidirectional_attention": True, "sliding_window": 9, "layer_types": None}
    config = read(tmp_path, "Gemma3TextModel", **fields)
    expected = transformers.Gemma3TextConfig(**(SIZES | fields))
    for attention, kind in zip(config.attentions, expected.layer_types, strict=True):
        is_full = kind == "full_attention"
        assert attention.window == (None if is_full else expected.sliding_window)
        assert attention.ahead == (None if is_full else expected.sliding_window - 1)


@pytest.mark.parametrize(
    ("architecture", "purpose", "family"),
    [
        ("BertForMaskedLM", Purpose.EMBED, "bert"),
        ("BertForPreTraining", Purpose.EMBED, "bert"),
        ("XLMRobertaForSequenceClassification", Purpose.CLASSIFY, "roberta"),
        ("ModernBertForTokenClassification", Purpose.CLASSIFY_TOKENS, "modernbert"),
        ("Gemma3TextModel", Purpose.EMBED, "gemma3"),
        ("GPT2Model", Purpose.EMBED, "gpt2"),
        ("Qwen2ForProcessRewardModel", Purpose.REWARD, "qwen2"),
        ("Qwen3ForSequenceClassification", Purpose.CLASSIFY, "qwen3"),
    ],
)
def test_architectures_without_an_lm_head(architecture: str, purpose: Purpose, family: str) -> None:
    assert purpose_of(architecture) is purpose
    assert find_family(architecture).__name__ == f"shmllm.models.families.{family}"


MIXED = {"moe_every_n_layers": 2, "num_experts": 8, "moe_top_k": 2}
GELU = {"activation_function": "gelu"}
JINA = {
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "type_vocab_size": 1,
    "lora_adaptations": ["x", "y"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ALIBI = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
CODE = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
T5 = {"d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 96}
NTK = {"type": "ntk", "factor": 8.0}
CLASSIFIER = "ModernBertForSequenceClassification"


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "'relative_key' is not supp"),
        ("BertModel", {"is_decoder": True}, "is_decoder True is not supported"),
        ("BertModel", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("NomicBertModel", NOMIC | {"prenorm": True}, "prenorm True is not supported"),
        ("NomicBertModel", NOMIC | MIXED, "experts with gates are not supported"),
        ("NomicBertModel", NOMIC | MIXED | {"moe_top_k": 9} | GELU, "moe_top_k must be at most"),
        ("NomicBertModel", NOMIC | {"ffn_div": 2}, "ffn_div 2 is not supported"),
        ("NomicBertModel", NOMIC | {"mlp_fc1_bias": True}, "mlp_fc1_bias True is not supported"),
        ("NomicBertModel", NOMIC | {"rotary_emb_fraction": 0.5}, "fraction 0.5 is not supported"),
        ("NomicBertModel", NOMIC | {"activation_function": "relu"}, "'relu' is not supported"),
        ("XLMRobertaModel", JINA | {"emb_pooler": "max"}, "emb_pooler 'max' is not supported"),
        ("XLMRobertaModel", JINA | {"truncate_dim": 32}, "truncate_dim 32 is not supported"),
        (
            "XLMRobertaModel",
            JINA | {"default_task": "z"},
            "'z' is none of lora_adaptations: 'x',",
        ),
        ("JinaEmbeddingsV5Model", {"jina_task": "z"}, "'z' is none of task_names: 'retrieval', 't"),
        ("JinaEmbeddingsV5Model", {"jina_task": "z", "task_names": []}, "of task_names: none"),
        *(
            ("JinaEmbeddingsV5Model", {"jina_task": each, "task_names": [each]}, "no directory in")
            for each in ("a/b", ".h", "..", "../../x", "/x", "", "a\0", "x" * 256)
        ),
        ("JinaEmbeddingsV5Model", {"task_names": ["retrieval", "a/b"]}, "task_names has 'a/b',"),
        ("JinaEmbeddingsV5Model", {"jina_task": 3}, "'jina_task' must be a string, not 3"),
        ("JinaEmbeddingsV5Model", {"task_names": "z"}, "'task_names' must be a list of strings"),
        ("JinaEmbeddingsV5Model", {"is_decoder": 1}, "'is_decoder' must be"),
        ("JinaEmbeddingsV5Model", {"quantization_config": FP8}, "with adapters for tasks are not"),
        ("XLMRobertaModel", JINA | {"rotary_emb_base": None}, "'rotary_emb_base' is missing"),
        ("JinaBertModel", {}, "position_embedding_type 'absolute' is not supported"),
        ("JinaBertModel", ALIBI | {"feed_forward_type": "original"}, "'original' is not supported"),
        ("JinaBertModel", ALIBI | {"auto_map": CODE}, "norms of queries and keys"),
        ("JinaBertForSequenceClassification", ALIBI, "Classification is not supported"),
        (
            "HF_ColBERT",
            {"model_type": "electra"},
            "model_type 'electra' and position_embedding_type",
        ),
        ("T5EncoderModel", T5 | {"feed_forward_proj": "x-relu"}, "'x-relu' is not supported"),
        ("T5EncoderModel", T5 | {"relative_attention_num_buckets": 30}, "buckets 30 with"),
        ("T5EncoderModel", T5 | {"relative_attention_max_distance": 8}, "distance 8 is not supp"),
        ("MPNetModel", {"max_position_embeddings": 2**30}, "must be an integer of at most 131,072"),
        ("T5EncoderModel", T5 | {"n_positions": 2**30}, "must be an integer of at most 131,072"),
        ("JinaBertModel", ALIBI | {"max_position_embeddings": 2**30}, "of at most 131,072"),
        ("DPRContextEncoder", {"projection_dim": 9}, "projection_dim 9 is not supported"),
        ("NewModel", {"logn_attention_scale": True}, "logn_attention_scale True is not supported"),
        ("NewModel", {"position_embedding_type": "absolute"}, "'absolute' is not supported"),
        ("NewModel", {"rope_scaling": NTK | {"mixed_b": 0.6}}, "mixed_b 0.6 is not supported"),
        ("MPNetModel", {"relative_attention_num_buckets": 16}, "num_buckets 16 is not supported"),
        ("MPNetModel", {"max_position_embeddings": 2}, "max_position_embeddings must exceed 2"),
        ("DebertaModel", {"talking_head": True}, "talking_head True is not supported"),
        ("DebertaV2Model", {"conv_kernel_size": 3}, "conv_kernel_size 3 is not supported"),
        ("DebertaV2Model", {"embedding_size": 32}, "embedding_size 32 is not supported"),
        ("DebertaV2Model", {"attention_head_size": 8}, "attention_head_size 8 is not supported"),
        ("DebertaV2Model", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide"),
        ("DebertaV2ForSequenceClassification", {"pooler_hidden_act": "relu2"}, "'relu2' is not"),
        ("DebertaV2Model", {"pos_att_type": "c2p|p2p"}, "pos_att_type 'p2p' is not supported"),
        ("DebertaV2Model", {"pos_att_type": {"c2p": 1}}, "'pos_att_type' must be a list of texts"),
        ("DebertaV2Model", DEBERTA | {"norm_rel_ebd": "rms"}, "norm_rel_ebd 'rms' is not"),
        ("DebertaV2Model", DEBERTA | {"position_buckets": 1024}, "position_buckets 1024 with max"),
        ("DebertaV2Model", {"max_position_embeddings": 2**30}, "must be an integer of at most"),
        ("DebertaV2ForSequenceClassification", {"pooler_hidden_size": 8}, "size 8 is not supp"),
        ("OpenAIPrivacyFilterModel", {"swiglu_alpha": 1.0}, "swiglu_alpha 1 is not supported"),
        ("OpenAIPrivacyFilterModel", {"swiglu_limit": 5.0}, "swiglu_limit 5 is not supported"),
        ("OpenAIPrivacyFilterModel", {"sliding_window": None}, "sliding_window null is not"),
        ("OpenAIPrivacyFilterModel", {"sliding_window": 0}, "'sliding_window' must be an integer"),
        ("AlbertModel", {"inner_group_num": 2}, "inner_group_num 2 is not supported"),
        ("AlbertModel", {"num_hidden_groups": 5}, "num_hidden_groups 5 exceeds num_hidden_layers"),
        ("ErnieModel", {"task_type_vocab_size": 0}, "'task_type_vocab_size' must be an integer"),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "x"}, "'x' is not supported"),
        ("RobertaModel", {"max_position_embeddings": 2}, r"max_position_embeddings \(2\) must ex"),
        ("BertLMHeadModel", {}, "unknown architecture 'BertLMHeadModel'"),
        (CLASSIFIER, {"classifier_pooling": "max"}, "classifier_pooling 'max' is not supported"),
        (CLASSIFIER, {"classifier_activation": "relu2"}, "classifier_activation 'relu2' is not"),
        (CLASSIFIER, {"layer_types": ["full_attention"]}, "'layer_types' must list one type for"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "in a model that generates"),
        ("MambaForCausalLM", {"is_causal": False}, "is_causal False is supported with plain"),
        ("Qwen3ForSequenceClassification", {"problem_type": "x"}, "problem_type 'x' is not known"),
        ("Qwen3ForSequenceClassification", {"problem_type": []}, r"problem_type \[\] is not known"),
        ("Qwen3ForSequenceClassification", {"classifier_from_token": "no"}, "a list of tokens"),
        ("Qwen3ForSequenceClassification", {"classifier_from_token": ["no"]}, "tokenizer.json"),
    ],
)
def test_what_is_refused(
    architecture: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, architecture, **fields)


def test_unknown_ways_to_make_classes_of_tokens_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "<unk>", "yes", "no")
    name, pair = "Qwen3ForSequenceClassification", {"classifier_from_token": ["no", "yes"]}
    assert len(read(tmp_path, name, **pair).head.labels) == 2
    softmax = pair | {"method": "from_2_way_softmax"}
    assert len(read(tmp_path, name, **softmax).head.labels) == 1
    for fields, reason in [
        (pair | {"method": "x"}, "method 'x' is not supported"),
        ({"classifier_from_token": ["maybe"]}, "'maybe' is no token"),
        (softmax | {"classifier_from_token": ["no"]}, "must have 2 tokens, got 1"),
    ]:
        with pytest.raises(EngineStartError, match=reason):
            read(tmp_path, name, **fields)
    with pytest.raises(EngineStartError, match="an LM head with a bias are not supported"):
        read(tmp_path, "PhiForSequenceClassification", **pair)


@pytest.mark.parametrize(
    ("architecture", "use"),
    [
        ("BartForConditionalGeneration", {"runner": "pooling"}),
        ("BartForConditionalGeneration", {"convert": "classify"}),
        ("BartForSequenceClassification", {"convert": "embed"}),
    ],
)
def test_an_encoder_decoder_makes_no_vectors(
    architecture: str, use: dict[str, Any], tmp_path: Path
) -> None:
    fields = {"architectures": [architecture], "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path, ModelUse()).num_encoded
    with pytest.raises(EngineStartError, match="is an encoder-decoder, which makes no vectors"):
        read_config(tmp_path, ModelUse(**use))
