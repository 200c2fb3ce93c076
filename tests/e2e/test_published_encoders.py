"""Encoders whose authors' files have other fields and names than those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import lora_adapters
from support.pooling_models import (
    assert_vectors_close,
    make_pooling_model,
    pool,
    pooling_prompts,
    rewrite_config,
    write_modules,
)
from support.variants import slow

from shmllm import LLM
from shmllm.models.weight_names import renamed
from shmllm.params.pooling import Pooling, PoolingType

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPTS = pooling_prompts()
OPTIONS: dict[str, Any] = {
    "multiprocess": False,
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
}
MEAN = Pooling(PoolingType.MEAN, normalize=False)
NOMIC: dict[str, Any] = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_inner": 128,
    "n_positions": 160,
    "layer_norm_epsilon": 1e-3,
    "activation_function": "swiglu",
    "rotary_emb_base": 50,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "max_trained_positions": 130,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "use_rms_norm": False,
    "causal": False,
}
"""The fields of nomic-embed-text-v1, with other sizes."""


@torch.inference_mode()
def means_of(model: Any) -> list[torch.Tensor]:
    return [model.base_model(torch.tensor([x])).last_hidden_state[0].mean(0) for x in PROMPTS]


def write_as_nomic(directory: Path, fields: dict[str, Any]) -> None:
    """Writes config.json with Nomic's own fields in place of transformers'."""
    names = "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"
    others = "layer_norm_eps", "hidden_act", "rope_parameters", "max_position_embeddings"
    rewrite_config(directory, **dict.fromkeys((*names, *others, "head_dim")), **(NOMIC | fields))


@pytest.mark.parametrize(
    ("fields", "positions"),
    [({}, 160), ({"rotary_scaling_factor": 2}, 130), ({"activation_function": "geglu"}, 160)],
)
def test_the_fields_of_nomics_own_files(
    fields: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    """The angles of texts that are longer than those of the training may depend on their length."""
    kind = "gelu" if "activation_function" in fields else "silu"
    rope = {"rope_theta": 50.0, "rope_type": "default"}
    own = {"hidden_act": kind, "layer_norm_eps": 1e-3, "rope_parameters": rope}
    model = make_pooling_model("nomic_bert", "Model", tmp_path, **own)
    write_as_nomic(tmp_path, fields)
    write_modules(tmp_path, ("Pooling", {"pooling_mode_mean_tokens": True}))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.max_model_len == positions
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        assert not llm.front_end.info.pooling.normalize
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)


@pytest.mark.parametrize(("types", "name"), [(1, "New"), slow(0, "GteNew")])
@torch.inference_mode()
def test_the_fields_and_names_of_gtes_own_files(types: int, name: str, tmp_path: Path) -> None:
    """Their rotation "ntk" divides the frequencies of a larger base (https://kexue.fm/archives/9706);
    a reranker's weights have the prefix "new"."""
    suffix = "ForSequenceClassification"
    model = make_pooling_model("gte", suffix, tmp_path, type_vocab_size=types, num_labels=1)
    path, factor, powers = tmp_path / "model.safetensors", 8.0, torch.arange(0, 16, 2) / 16
    frequencies = model.gte.rotary_emb.inv_freq
    frequencies.copy_((factor * 50.0) ** -powers / factor ** (2 / 16))
    save_file({f"new.{n.removeprefix('gte.')}": x for n, x in load_file(path).items()}, path)
    published = {"rope_scaling": {"type": "ntk", "factor": factor}, "rope_theta": 50.0}
    published |= {
        "model_type": "new",
        "architectures": [f"{name}{suffix}"],
        "rope_parameters": None,
    }
    rewrite_config(tmp_path, **published, logn_attention_scale=False, layer_norm_type="layer_norm")
    logits = [model(torch.tensor([each])).logits[0] for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.pooling.task == "classify"
        pooling = Pooling(PoolingType.CLS, normalize=False, uses_head=True)
        assert_vectors_close(pool(llm, PROMPTS, pooling), logits, 1e-5)


def test_the_experts_of_nomic(tmp_path: Path) -> None:
    model = make_pooling_model("nomic_moe", "Model", tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = pool(llm, PROMPTS, MEAN)
        assert_vectors_close(found, means_of(model), 1e-5)
        alone = [pool(llm, [prompt], MEAN)[0] for prompt in PROMPTS]
        assert all(each.tobytes() == own.tobytes() for each, own in zip(found, alone, strict=True))


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"tensor_parallel_size": 2, "num_threads": 2, "multiprocess": True}, 1e-5),
        ({"pipeline_parallel_size": 2, "num_threads": 2, "multiprocess": True}, 1e-5),
        ({"quantization": "int8"}, 0.1),
        ({"dtype": "bfloat16"}, 0.05),
    ],
)
def test_the_experts_of_nomic_in_parts(
    options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    model = make_pooling_model("nomic_moe", "Model", tmp_path / "first")
    with LLM(str(tmp_path / "first"), **(OPTIONS | options)) as llm:
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), tolerance)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.save_pretrained(tmp_path / "second")
        llm.update_weights(list(load_file(tmp_path / "second" / "model.safetensors").items()))
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), tolerance)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("t5_encoder", {}),
        slow("mt5_encoder", {}),
        ("umt5_encoder", {}),
        slow("t5_encoder", {"feed_forward_proj": "gated-silu"}),
        slow("t5_encoder", {"relative_attention_num_buckets": 8}),
        slow("t5_encoder", {"relative_attention_max_distance": 20}),
    ],
)
@torch.inference_mode()
def test_encoders_of_t5(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path, **config)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.max_model_len == 512
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        llm.update_weights(list(model.named_parameters()))
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)


TASKS = ["retrieval.query", "retrieval.passage", "separation"]
JINA: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "rope_parameters": None,
    "emb_pooler": "mean",
    "lora_adaptations": TASKS,
    "lora_alpha": 2,
    "lora_rank": 4,
}
"""The fields of jina-embeddings-v3 that transformers does not write."""


def drawn_adapters(weights: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """A and B of each matrix of a model as the authors' files have them, by its module."""
    found = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            (rows, columns), count = weight.shape, len(TASKS)
            shapes = (count, 4, columns), (count, rows, 4)
            if ".embeddings." in name:
                shapes = (count, rows, 4), (count, 4, columns)
            found[name.removesuffix(".weight")] = tuple(0.1 * torch.randn(x) for x in shapes)
    return found


@pytest.mark.parametrize("task", [None, "retrieval.passage", slow("separation")])
@torch.inference_mode()
def test_the_tasks_of_jinas_own_files(task: str | None, tmp_path: Path) -> None:
    model = make_pooling_model("jina_embeddings_v3", "Model", tmp_path)
    path = tmp_path / "model.safetensors"
    plain = {f"roberta.{name}": weight for name, weight in load_file(path).items()}
    adapters, stored = drawn_adapters(plain), dict(plain)
    for module, matrices in adapters.items():
        weight, own = stored.pop(f"{module}.weight"), f"{module}.parametrizations.weight"
        stored |= {f"{own}.original": weight}
        stored |= {f"{own}.0.lora_{x}": each for x, each in zip("AB", matrices, strict=True)}
        if task is not None:
            a, b = (each[TASKS.index(task)] for each in matrices)
            change = a @ b if ".embeddings." in module else b @ a
            plain[f"{module}.weight"] = weight + 2 / 4 * change
    save_file(plain, path)
    merged = type(model).from_pretrained(tmp_path).eval()
    save_file(stored, path)
    rewrite_config(tmp_path, **JINA)
    overrides = {} if task is None else {"default_task": task}
    with LLM(str(tmp_path), **OPTIONS, hf_overrides=overrides) as llm:
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(merged), 1e-5)
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(merged), 1e-5)
    own, changed = (each.layers[1].mlp.fc2.weight for each in (model, merged))
    assert (task is None) == torch.equal(own, changed)


V5: dict[str, Any] = {
    "architectures": ["JinaEmbeddingsV5Model"],
    "model_type": "jina_embeddings_v5",
    "task_names": ["retrieval", "text-matching"],
}
"""The fields of jina-embeddings-v5 that transformers does not write."""


@pytest.mark.parametrize(
    ("kind", "task"),
    [("qwen3", None), slow("qwen3", "text-matching"), ("eurobert", "text-matching")],
)
@torch.inference_mode()
def test_the_tasks_of_jina_embeddings_v5(kind: str, task: str | None, tmp_path: Path) -> None:
    """Its decoder attends to what is before a token, its encoder to the whole text."""
    model = make_pooling_model(kind, "Model", tmp_path)
    own = {} if kind == "qwen3" else {"is_decoder": False}
    rewrite_config(tmp_path, **V5, **own)
    shapes = lora_adapters.linear_modules(model)
    adapters = {
        name: lora_adapters.draw(shapes, seed) for seed, name in enumerate(V5["task_names"])
    }
    for name, tensors in adapters.items():
        lora_adapters.write(tmp_path / "adapters" / name, tensors)
    merged = lora_adapters.merged(model, adapters[task or "retrieval"], 2.0)
    states = [merged(torch.tensor([each])).last_hidden_state[0, -1] for each in PROMPTS]
    overrides = {} if task is None else {"jina_task": task}
    last = Pooling(PoolingType.LAST, normalize=False)
    with LLM(str(tmp_path), **OPTIONS, hf_overrides=overrides) as llm:
        info = llm.front_end.info.pooling
        assert (info.pooling_type, info.normalize, info.generates) == ("LAST", True, False)
        assert_vectors_close(pool(llm, PROMPTS, last), states, 1e-5)
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert_vectors_close(pool(llm, PROMPTS, last), states, 1e-5)


@pytest.mark.parametrize(("heads", "gate"), [(12, "geglu"), slow(4, "geglu"), slow(4, "reglu")])
def test_attention_that_falls_with_the_distance(heads: int, gate: str, tmp_path: Path) -> None:
    shape = {"num_attention_heads": heads, "hidden_size": 16 * heads, "feed_forward_type": gate}
    model = make_pooling_model("jina_bert", "Model", tmp_path, **shape)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.front_end.info.pooling.pooling_type == "MEAN"
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jina_bert", "t5_encoder"])
@pytest.mark.parametrize("ways", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_have_the_distances_of_their_heads(ways: str, kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path)
    options = OPTIONS | {"multiprocess": True, "num_threads": 2, ways: 2}
    with LLM(str(tmp_path), **options) as llm:
        assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)


@torch.inference_mode()
def test_the_names_of_jinas_reranker(tmp_path: Path) -> None:
    """Its layers are those of XLM-RoBERTa, under other names."""
    suffix = "ForSequenceClassification"
    model = make_pooling_model("xlm_roberta", suffix, tmp_path, num_labels=1)
    path, names = (
        tmp_path / "model.safetensors",
        {
            "encoder.layer.": "encoder.layers.",
            "embeddings.LayerNorm.": "emb_ln.",
            ".attention.self.": ".mixer.",
            ".attention.output.dense.": ".mixer.out_proj.",
            ".attention.output.LayerNorm.": ".norm1.",
            ".intermediate.dense.": ".mlp.fc1.",
            ".output.dense.": ".mlp.fc2.",
            ".output.LayerNorm.": ".norm2.",
        },
    )
    stored = {renamed(name, names): weight for name, weight in load_file(path).items()}
    for name in [name for name in stored if ".mixer.query." in name]:
        parts = [stored.pop(name.replace(".query.", f".{x}.")) for x in ("query", "key", "value")]
        stored[name.replace(".query.", ".Wqkv.")] = torch.cat(parts)
    save_file(stored, path)
    logits = [model(torch.tensor([each])).logits[0] for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        pooling = Pooling(PoolingType.CLS, normalize=False, uses_head=True)
        assert_vectors_close(pool(llm, PROMPTS, pooling), logits, 1e-5)


@pytest.mark.parametrize("suffix", ["Model", slow("ForSequenceClassification")])
@pytest.mark.parametrize(
    "kind", ["nomic_bert", "gte", "jina_embeddings_v3", "mpnet", slow("deberta_v2")]
)
@torch.inference_mode()
def test_updates_come_under_the_names_of_files_and_modules(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    model = make_pooling_model(kind, suffix, tmp_path / "first")
    with LLM(str(tmp_path / "first"), **OPTIONS) as llm:
        for source in ("modules", "files"):
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model.save_pretrained(tmp_path / source)
            stored = load_file(tmp_path / source / "model.safetensors")
            assert any("encoder.layer" in name for name in stored)
            llm.sleep(level=2)
            llm.wake_up()
            weights = dict(model.named_parameters()) if source == "modules" else stored
            llm.update_weights(list(weights.items()))
            assert_vectors_close(pool(llm, PROMPTS, MEAN), means_of(model), 1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bert", "jina_bert", slow("jina_embeddings_v3")])
def test_colbert_projects_each_token(kind: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path)
    linear = torch.nn.Linear(64, 24, bias=False)
    path, prefix = tmp_path / "model.safetensors", "bert"
    if kind == "jina_embeddings_v3":
        rewrite_config(tmp_path, **JINA | {"lora_adaptations": None})
        prefix = "roberta"
    stored = {f"{prefix}.{name}": weight for name, weight in load_file(path).items()}
    save_file(stored | {"linear.weight": linear.weight}, path)
    rewrite_config(tmp_path, architectures=["HF_ColBERT"])
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": 24, "query_token_id": "[Q]"}))
    states = [linear(model(torch.tensor([each])).last_hidden_state[0]) for each in PROMPTS]
    wanted = [torch.nn.functional.normalize(each, dim=1) for each in states]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        info = llm.front_end.info.pooling
        assert (info.task, info.normalize, info.embedding_size) == ("token_embed", True, 24)
        assert info.prompts == {"query": "[Q] ", "document": "[unused1] "}
        prompts = [{"prompt_token_ids": each} for each in PROMPTS]
        found = [np.asarray(each.outputs.data) for each in llm.encode(prompts, use_tqdm=False)]
        assert_vectors_close(found, wanted, 1e-5)


@pytest.mark.filterwarnings("ignore")  # transformers' about its convolution
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("modernbert", "ColBERTModernBertModel"),
        ("lfm2", "ColBERTLfm2Model"),
        slow("lfm2_bidirectional", "Lfm2BidirectionalModel"),
    ],
)
@torch.inference_mode()
def test_models_of_pylate_have_the_names_of_vllm(kind: str, name: str, tmp_path: Path) -> None:
    model = make_pooling_model(kind, "Model", tmp_path)
    linear = torch.nn.Linear(64, 24, bias=False)
    write_modules(tmp_path, linear)
    listed = (tmp_path / "modules.json").read_text()
    kinds = "sentence_transformers.models.Dense", "pylate.models.Dense.Dense"
    (tmp_path / "modules.json").write_text(listed.replace(*kinds))
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "ColBERT"}')
    states = [linear(model(torch.tensor([each])).last_hidden_state[0]) for each in PROMPTS]
    wanted = [torch.nn.functional.normalize(each, dim=1) for each in states]
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS, hf_overrides={"architectures": [name]}) as llm:
        found = [each.outputs.array for each in llm.encode(prompts, use_tqdm=False)]
        assert_vectors_close(found, wanted, 1e-5)


@torch.inference_mode()
def test_voyage_projects_states_of_both_directions(tmp_path: Path) -> None:
    model = make_pooling_model("qwen3", "Model", tmp_path, is_causal=False)
    linear, path = torch.nn.Linear(64, 24, bias=False), tmp_path / "model.safetensors"
    stored = {f"model.{name}": weight for name, weight in load_file(path).items()}
    save_file(stored | {"linear.weight": linear.weight}, path)
    rewrite_config(tmp_path, is_causal=None, num_labels=24)
    name = "VoyageQwen3BidirectionalEmbedModel"
    with LLM(str(tmp_path), **OPTIONS, hf_overrides={"architectures": [name]}) as llm:
        info = llm.front_end.info.pooling
        assert (info.pooling_type, info.both_ways, info.embedding_size) == ("MEAN", True, 24)
        pooling = Pooling(PoolingType.MEAN, normalize=False, uses_head=True)
        wanted = [linear(each) for each in means_of(model)]
        assert_vectors_close(pool(llm, PROMPTS, pooling), wanted, 1e-5)
