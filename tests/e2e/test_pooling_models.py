"""Hidden states and logits of models without an LM head equal transformers'."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_models import write_model
from support.model_helpers import reference_model
from support.one_thread import one_thread
from support.pooling_models import (
    RewardModel,
    Vectors,
    assert_vectors_close,
    make_pooling_model,
    pool,
    pooling_prompts,
    rewrite_config,
    write_modules,
    write_tokenizer,
)
from support.remote_decoders import as_internlm2
from support.remote_families import Lfm2BidirectionalModel
from support.variants import slow
from transformers import LlamaModel

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.params.pooling import Pooling, PoolingType

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TOLERANCE = 1e-5
PROMPTS = pooling_prompts()
OPTIONS: dict[str, Any] = {
    "multiprocess": False,
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
}
ALL = Pooling(PoolingType.ALL, normalize=False, reads_prefix_cache=False)
LOGITS = Pooling(PoolingType.ALL, normalize=False, reads_prefix_cache=False, uses_head=True)
ENCODERS = ["bert", "roberta", "xlm_roberta", "camembert", "distilbert", "modernbert"]
ENCODERS += ["electra", "eurobert", "mpnet", "nomic_bert", "gte", "jina_embeddings_v3"]
ENCODERS += ["deberta", "deberta_v2", "albert", "electra_small", "ernie"]


@one_thread()
@torch.inference_mode()
def states_of(model: Any) -> list[torch.Tensor]:
    return [model.base_model(torch.tensor([each])).last_hidden_state[0] for each in PROMPTS]


@one_thread()
@torch.inference_mode()
def logits_of(model: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([each])).logits[0] for each in PROMPTS]


def pooled(kind: PoolingType, *, uses_head: bool = True) -> Pooling:
    return Pooling(kind, normalize=False, uses_head=uses_head)


def test_a_llama_that_attends_both_ways_pools_as_its_config_says(tmp_path: Path) -> None:
    model = make_pooling_model("llama_bidirectional", "Model", tmp_path)
    rewrite_config(tmp_path, is_causal=None)  # published files have the name of the class alone
    write_tokenizer(tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        found = [np.array(each.outputs.embedding, np.float32) for each in llm.embed(prompts)]
    means = [torch.nn.functional.normalize(x.mean(0), dim=0) for x in states_of(model)]
    assert_vectors_close(found, means, TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *product(ENCODERS, ["Model", "ForMaskedLM"]),
        *[("lfm2_bidirectional", "Model"), slow("lfm2_bidirectional", "ForMaskedLM")],
        *[("bert", "ForPreTraining"), ("electra", "ForPreTraining")],
    ],
)
def test_hidden_states_of_encoders(kind: str, suffix: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, suffix, tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        assert llm.front_end.info.max_model_len == 128
        assert llm.front_end.info.pooling.both_ways


@pytest.mark.parametrize(
    ("family", "kind"), [("lfm2", Lfm2BidirectionalModel), slow("llama", LlamaModel)]
)
def test_files_of_llama_cpp_may_attend_both_ways(family: str, kind: Any, tmp_path: Path) -> None:
    options = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
    decoder = reference_model(family, **(options if family == "lfm2" else {}))
    path = tmp_path / "m.gguf"
    write_model(path, decoder, lambda writer: writer.add_causal_attention(False))
    decoder.config.is_causal = False
    model = kind(decoder.config)
    model.load_state_dict(decoder.model.state_dict())
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS]
    with torch.inference_mode():
        wanted = [model(torch.tensor([each])).last_hidden_state[0] for each in prompts]
    with LLM(str(path), **OPTIONS, dtype="float32") as llm:
        assert_vectors_close(pool(llm, prompts, ALL), wanted, TOLERANCE)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_classify_texts(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "ForSequenceClassification", tmp_path, num_labels=5)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        logits = pool(llm, PROMPTS, pooled(PoolingType.CLS))
        assert_vectors_close(logits, logits_of(model), TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [slow("modernbert", "mean"), slow("eurobert", "mean"), ("eurobert", "late")],
)
def test_encoders_classify_means(kind: str, pooling: str, tmp_path: Path) -> None:
    config = {"num_labels": 5, "classifier_pooling": pooling}
    model = make_pooling_model(kind, "ForSequenceClassification", tmp_path, **config)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        logits = pool(llm, PROMPTS, pooled(PoolingType.MEAN))
        assert_vectors_close(logits, logits_of(model), TOLERANCE)


@torch.inference_mode()
def test_distances_beyond_the_last_bucket(tmp_path: Path) -> None:
    model = make_pooling_model("mpnet", "Model", tmp_path, max_position_embeddings=402)
    prompts = [[5 + 7 * i % 250 for i in range(length)] for length in (400, 131)]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        ours = pool(llm, prompts, ALL)
    wanted = [model(torch.tensor([each])).last_hidden_state[0] for each in prompts]
    assert_vectors_close(ours, wanted, TOLERANCE)


@pytest.mark.filterwarnings("ignore")  # transformers' about the rotation
@pytest.mark.parametrize("labels", [33, slow(3)])
def test_the_privacy_filter(labels: int, tmp_path: Path) -> None:
    name, fields = "ForTokenClassification", {"num_labels": labels}
    model = make_pooling_model("privacy_filter", name, tmp_path, **fields)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        info = llm.front_end.info.pooling
        assert (info.task, len(info.labels)) == ("token_classify", labels)
        assert info.labels[:2] == ("O", "B-account_number") or labels != 33
        assert_vectors_close(pool(llm, PROMPTS, LOGITS), logits_of(model), TOLERANCE)
        llm.update_weights(list(model.named_parameters()))
        assert_vectors_close(pool(llm, PROMPTS, LOGITS), logits_of(model), TOLERANCE)


RELATIONS: dict[str, dict[str, Any]] = {
    "as published": {"position_buckets": 256, "max_position_embeddings": 512},
    "own projections": {"share_att_key": False},
    "of keys": {"share_att_key": False, "pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    "of queries": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "no ranges": {"position_buckets": -1, "max_relative_positions": 20, "pos_att_type": "c2p"},
    "positions": {"position_biased_input": True, "type_vocab_size": 2},
    "version 1": {"kind": "deberta", "max_relative_positions": 20},
    "version 1, of keys": {"kind": "deberta", "pos_att_type": ["p2c"]},
    "version 1, none": {"kind": "deberta", "relative_attention": False},
    "none": {"relative_attention": False},
}


@pytest.mark.parametrize("fields", [*map(slow, RELATIONS.values())], ids=RELATIONS)
@torch.inference_mode()
def test_what_debertas_attention_knows_of_distances(fields: dict[str, Any], tmp_path: Path) -> None:
    given = {"kind": "deberta_v2"} | fields
    model = make_pooling_model(given.pop("kind"), "Model", tmp_path, **given)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        prompts = pooling_prompts(model.config.max_position_embeddings)
        wanted = [model(torch.tensor([each])).last_hidden_state[0] for each in prompts]
        assert_vectors_close(pool(llm, prompts, ALL), wanted, TOLERANCE)


@torch.inference_mode()
def test_types_of_the_tokens_of_pairs(tmp_path: Path) -> None:
    model = make_pooling_model("bert", "ForSequenceClassification", tmp_path, num_labels=5)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.pooling.token_types
        for begin in (1, 7, 16):
            prompts = [prompt for prompt in PROMPTS if len(prompt) > begin]
            types = [torch.arange(len(each))[None] >= begin for each in prompts]
            wanted = [
                model(torch.tensor([each]), token_type_ids=own.long()).logits[0]
                for each, own in zip(prompts, types, strict=True)
            ]
            pooling = replace(pooled(PoolingType.CLS), second_segment=begin)
            assert_vectors_close(pool(llm, prompts, pooling), wanted, TOLERANCE)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.inference_mode()
def test_embeddings_in_place_of_tokens(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path)
    table = model.get_input_embeddings().weight
    embeds = [2 * table[torch.tensor(each)] for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        prompts = [{"prompt_embeds": each} for each in embeds]
        ours = pool(llm, prompts, pooled(PoolingType.CLS, uses_head=False))
    wanted = [model(inputs_embeds=each[None]).last_hidden_state[0, 0] for each in embeds]
    assert_vectors_close(ours, wanted, TOLERANCE)


@pytest.mark.parametrize("kind", [*ENCODERS, "lfm2_bidir_p2"])
def test_encoders_classify_tokens(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "ForTokenClassification", tmp_path, num_labels=5)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, LOGITS), logits_of(model), TOLERANCE)


MODERN: dict[str, dict[str, Any]] = {
    "mean": {"classifier_pooling": "mean"},
    "biases": {"norm_bias": True, "attention_bias": True, "mlp_bias": True}
    | {"classifier_bias": True},
    "odd window": {"local_attention": 7, "classifier_activation": "silu"},
    "layer types": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "rope": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
        }
    },
}


@pytest.mark.parametrize("config", MODERN.values(), ids=MODERN)
def test_variants_of_modernbert(config: dict[str, Any], tmp_path: Path) -> None:
    suffix = "ForSequenceClassification"
    model = make_pooling_model("modernbert", suffix, tmp_path, num_labels=5, **config)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        kind = PoolingType[llm.front_end.info.pooling.pooling_type]
        assert kind is PoolingType[config.get("classifier_pooling", "cls").upper()]
        logits = pool(llm, PROMPTS, pooled(kind))
        assert_vectors_close(logits, logits_of(model), TOLERANCE)


@torch.inference_mode()
def test_the_fields_of_modernberts_older_files(tmp_path: Path) -> None:
    """They say the bases of the wavelengths, and how often a layer has no window."""
    thetas = {"global_rope_theta": 500.0, "local_rope_theta": 50.0}
    model = make_pooling_model("modernbert", "Model", tmp_path, **thetas)
    rewrite_config(
        tmp_path, rope_parameters=None, layer_types=None, global_attn_every_n_layers=3, **thetas
    )
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)


@pytest.mark.parametrize("suffix", ["QuestionEncoder", slow("ContextEncoder")])
@torch.inference_mode()
def test_encoders_of_dpr(suffix: str, tmp_path: Path) -> None:
    model = make_pooling_model("dpr", suffix, tmp_path)
    wanted = [model(torch.tensor([each])).pooler_output[0] for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = pool(llm, PROMPTS, pooled(PoolingType.CLS, uses_head=False))
        assert_vectors_close(found, wanted, TOLERANCE)


def test_the_name_of_contriever(tmp_path: Path) -> None:
    model = make_pooling_model("bert", "Model", tmp_path)
    rewrite_config(tmp_path, architectures=["Contriever"])
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        means = [each.mean(0) for each in states_of(model)]
        found = pool(llm, PROMPTS, pooled(PoolingType.MEAN, uses_head=False))
        assert_vectors_close(found, means, TOLERANCE)


def test_names_in_the_first_files_of_bert(tmp_path: Path) -> None:
    model = make_pooling_model("bert", "Model", tmp_path)
    path, renamed = tmp_path / "model.safetensors", {"embeddings.position_ids": torch.arange(128)}
    for name, weight in load_file(path).items():
        for new, old in (("LayerNorm.weight", "gamma"), ("LayerNorm.bias", "beta")):
            name = name.replace(new, f"LayerNorm.{old}")
        renamed[f"bert.{name}"] = weight
    save_file(renamed, path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)


@pytest.mark.parametrize("kind", ["gemma3", "llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_hidden_states_of_decoders_without_an_lm_head(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        assert llm.front_end.info.pooling.both_ways == (kind == "gemma3")


@pytest.mark.parametrize("suffix", ["Model", "ForCausalLM"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_decoders_whose_config_says_that_they_attend_both_ways(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    model = make_pooling_model(kind, suffix, tmp_path, is_causal=False)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        assert llm.front_end.info.pooling.both_ways
    with pytest.raises(EngineStartError, match="runner='generate' is not possible"):
        LLM(str(tmp_path), runner="generate", **OPTIONS)


@pytest.mark.parametrize("text", [False, True])
def test_overrides_say_what_a_model_is(text: bool, tmp_path: Path) -> None:
    """They are a mapping, or JSON text."""
    model = make_pooling_model("qwen3", "Model", tmp_path)
    rewrite_config(tmp_path, architectures=["AModelOfSomebody"])
    overrides: Any = {"architectures": ["Qwen3Model"], "max_position_embeddings": 130}
    overrides = json.dumps(overrides) if text else overrides
    with LLM(str(tmp_path), **OPTIONS, hf_overrides=overrides) as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        assert llm.front_end.info.max_model_len == 130
    with pytest.raises(EngineStartError, match="unknown architecture 'AModelOfSomebody'"):
        LLM(str(tmp_path), **OPTIONS, hf_overrides={"max_position_embeddings": 130})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3"])
def test_decoders_classify_texts(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "ForSequenceClassification", tmp_path, num_labels=3)
    wanted = logits_of(model)
    for options in ({}, {"max_num_batched_tokens": 16}):
        with LLM(str(tmp_path), **OPTIONS, **options) as llm:
            logits = pool(llm, PROMPTS, pooled(PoolingType.LAST))
            assert_vectors_close(logits, wanted, TOLERANCE)


@pytest.mark.parametrize(("kind", "bias"), [("llama", True), ("qwen3", False)])
def test_decoders_classify_tokens(kind: str, bias: bool, tmp_path: Path) -> None:
    config = {"num_labels": 3, "token_classification_bias": bias}
    model = make_pooling_model(kind, "ForTokenClassification", tmp_path, **config)
    assert (model.score.bias is not None) == bias
    for options in ({}, {"max_num_batched_tokens": 16}):
        with LLM(str(tmp_path), **OPTIONS, **options) as llm:
            assert_vectors_close(pool(llm, PROMPTS, LOGITS), logits_of(model), TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "num_labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)]
)
@torch.inference_mode()
def test_reward_models(architecture: str, num_labels: int, tmp_path: Path) -> None:
    model = RewardModel(tmp_path, architecture, num_labels)
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=32) as llm:
        rewards = pool(llm, PROMPTS, LOGITS)
        assert_vectors_close(rewards, [model.rewards(each) for each in PROMPTS], TOLERANCE)
        assert llm.front_end.info.pooling.task == "token_classify"


@torch.inference_mode()
def test_rewards_of_internlm2(tmp_path: Path) -> None:
    """Llama with one projection, under other names."""
    model = make_pooling_model("llama", "Model", tmp_path)
    head = torch.randn(1, model.config.hidden_size)
    named = {f"model.{name}": each for name, each in model.state_dict().items()}
    weights = as_internlm2(named, model.config.num_key_value_heads) | {"v_head.weight": head}
    save_file(
        {name: each.clone() for name, each in weights.items()}, tmp_path / "model.safetensors"
    )
    own = {"architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2", "bias": False}
    rewrite_config(tmp_path, **own)
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=32) as llm:
        states = [model(torch.tensor([each])).last_hidden_state[0] for each in PROMPTS]
        assert_vectors_close(
            pool(llm, PROMPTS, LOGITS), [each @ head.T for each in states], TOLERANCE
        )
        assert llm.front_end.info.pooling.task == "token_classify"


RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def scores(llm: LLM) -> Vectors:
    return [1 / (1 + np.exp(-each)) for each in pool(llm, PROMPTS, pooled(PoolingType.LAST))]


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_reranker_reads_the_logits_of_yes_and_no(tied: bool, tmp_path: Path) -> None:
    """The head is one row, which follows the LM head's weight in updates."""
    model = make_pooling_model("qwen3", "ForCausalLM", tmp_path, tie_word_embeddings=tied)
    write_tokenizer(tmp_path, "<unk>", "maybe", "yes", "no")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"

    def wanted() -> list[torch.Tensor]:
        logits = [model(torch.tensor([each])).logits[0, -1] for each in PROMPTS]
        return [each[[3, 2]].softmax(0)[1:] for each in logits]

    with LLM(str(tmp_path), **OPTIONS, hf_overrides=RERANKER) as llm:
        assert_vectors_close(scores(llm), wanted(), TOLERANCE)
        info = llm.front_end.info.pooling
        assert (info.tasks, info.activation) == (("classify", "token_classify"), "sigmoid")
        assert not info.generates
        model.lm_head.weight.mul_(1.5)
        llm.update_weights([(name, model.lm_head.weight)])
        assert_vectors_close(scores(llm), wanted(), TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_cross_encoder_of_sentence_transformers_reads_logits(tied: bool, tmp_path: Path) -> None:
    model = make_pooling_model("qwen3", "ForCausalLM", tmp_path, tie_word_embeddings=tied)
    tokens = {"true_token_id": 9, "false_token_id": 30}
    write_modules(tmp_path, ("LogitScore", tokens))
    logits = [model(torch.tensor([each])).logits[0, -1] for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        wanted = [torch.sigmoid(each[9:10] - each[30:31]) for each in logits]
        assert_vectors_close(scores(llm), wanted, TOLERANCE)
        info = llm.front_end.info.pooling
        assert (info.tasks[0], info.activation, info.generates) == ("classify", "sigmoid", True)
        greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        outputs = llm.generate(PROMPTS[:4], greedy, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [
            [int(each.argmax())] for each in logits[:4]
        ]


@torch.inference_mode()
def test_classes_that_are_tokens_of_a_decoder(tmp_path: Path) -> None:
    model = make_pooling_model("llama", "ForCausalLM", tmp_path, tie_word_embeddings=False)
    write_tokenizer(tmp_path, "<unk>", "maybe", "yes", "no")
    overrides = {"classifier_from_token": ["no", "maybe", "yes"]}
    with LLM(str(tmp_path), **OPTIONS, convert="classify", hf_overrides=overrides) as llm:
        logits = [model(torch.tensor([each])).logits[0, -1, [3, 1, 2]] for each in PROMPTS]
        assert_vectors_close(pool(llm, PROMPTS, pooled(PoolingType.LAST)), logits, TOLERANCE)
        assert llm.front_end.info.pooling.activation == "softmax"


@pytest.mark.parametrize(
    ("kind", "suffix"), [("qwen3", "ForSequenceClassification"), ("llama", "ForCausalLM")]
)
def test_a_model_converted_to_embeddings_has_no_head(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    model = make_pooling_model(kind, suffix, tmp_path, tie_word_embeddings=False)
    with LLM(str(tmp_path), **OPTIONS, convert="embed") as llm:
        assert_vectors_close(pool(llm, PROMPTS, ALL), states_of(model), TOLERANCE)
        info = llm.front_end.info.pooling
        assert (info.tasks, info.head, info.generates) == (("embed", "token_embed"), "", False)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_projections_of_sentence_transformers(bias: bool, tmp_path: Path) -> None:
    """EmbeddingGemma's files: attention both ways, a mean, two projections, a norm."""
    model = make_pooling_model("gemma3", "Model", tmp_path)
    dense = [torch.nn.Linear(64, 96, bias), torch.nn.Linear(96, 48, bias)]
    pooling = {"embedding_dimension": 64, "pooling_mode": "mean"}
    write_modules(tmp_path, ("Pooling", pooling), *dense, ("Normalize", {}))
    means = [states.mean(0) for states in states_of(model)]
    wanted = [torch.nn.functional.normalize(dense[1](dense[0](x)), dim=0) for x in means]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        info = llm.front_end.info.pooling
        assert (info.pooling_type, info.head, info.normalize) == ("MEAN", "projection", True)
        assert info.embedding_size == 48
        pooling = Pooling(PoolingType.MEAN, normalize=True, uses_head=True)
        assert_vectors_close(pool(llm, PROMPTS, pooling), wanted, TOLERANCE)
        dense[0].weight.mul_(2)
        llm.update_weights([("2_Dense.linear.weight", dense[0].weight)])
        wanted = [torch.nn.functional.normalize(dense[1](dense[0](x)), dim=0) for x in means]
        assert_vectors_close(pool(llm, PROMPTS, pooling), wanted, TOLERANCE)
