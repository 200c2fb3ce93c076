"""Sparse vectors equal the formula of SPLADE with transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import command
from support.pooling_models import (
    assert_vectors_close,
    make_pooling_model,
    pooling_prompts,
    rewrite_config,
    write_tokenizer,
)
from support.variants import slow

from shmllm import LLM, EngineStartError, PoolingParams, RequestError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "multiprocess": False,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
}
PROMPTS = pooling_prompts()
ASKED = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
OF_VLLM = {"hf_overrides": {"architectures": ["BertSpladeSparseEmbeddingModel"]}}
MODULES = "sentence_transformers.sparse_encoder.models."


def write_splade(directory: Path, **fields: Any) -> None:
    """Writes what sentence-transformers leaves of a SparseEncoder."""
    place = directory / "1_SpladePooling"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"pooling_strategy": "max"} | fields))
    kinds = {"": "MLMTransformer", place.name: "SpladePooling"}
    listed = [{"path": path, "type": MODULES + kind} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(listed))


def make(kind: str, directory: Path) -> Any:
    write_tokenizer(directory)
    return make_pooling_model(kind, "ForMaskedLM", directory)


@torch.inference_mode()
def largest(model: Any) -> list[torch.Tensor]:
    """What the largest logits of each prompt make."""
    logits = [model(torch.tensor([each])).logits[0] for each in PROMPTS]
    return [each.relu().log1p().amax(0) for each in logits]


def test_the_name_that_vllm_has(tmp_path: Path) -> None:
    model = make("bert", tmp_path)
    with LLM(str(tmp_path), **OPTIONS, **OF_VLLM) as llm:
        outputs = [each.outputs for each in llm.embed(ASKED, use_tqdm=False)]
        assert_vectors_close([each.array for each in outputs], largest(model), 1e-5)
        for output in outputs:
            dense = np.zeros(output.hidden_size, np.float32)
            dense[[*output.sparse]] = [*output.sparse.values()]
            assert np.array_equal(dense, output.array)
            assert 0 < len(output.sparse) < output.hidden_size
        states = llm.encode(ASKED, pooling_task="token_embed", use_tqdm=False)
        assert [each.outputs.array.shape for each in states] == [(len(p), 64) for p in PROMPTS]
        with pytest.raises(RequestError, match="'MEAN' is not possible: the model makes sparse"):
            llm.embed(ASKED, pooling_params=PoolingParams(pooling_type="MEAN"))


@pytest.mark.parametrize(
    ("kind", "activation"),
    [("distilbert", "relu"), slow("bert", "log1p_relu"), slow("bert", "relu")],
)
def test_the_files_of_sentence_transformers(kind: str, activation: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    write_splade(tmp_path, activation_function=activation)
    wanted = [each.log1p() if activation != "relu" else each for each in largest(model)]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.embed(ASKED, use_tqdm=False)
        assert_vectors_close([each.outputs.array for each in outputs], wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2, "num_threads": 2}, {}])
def test_updates_change_the_table_of_both_ends(options: dict[str, Any], tmp_path: Path) -> None:
    model = make("bert", tmp_path)
    with LLM(str(tmp_path), **OPTIONS | options, **OF_VLLM) as llm:
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(list(model.named_parameters()))
        outputs = llm.embed(ASKED, use_tqdm=False)
        assert_vectors_close([each.outputs.array for each in outputs], largest(model), 1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("bert", {"pooling_strategy": "sum"}, "shmllm does not compute the pooling 'sum'"),
        ("bert", {"activation_function": "tanh"}, "activation_function 'tanh' is not supported"),
        ("modernbert", {}, "sparse vectors of ModernBertForMaskedLM are not supported"),
    ],
)
def test_what_is_refused(kind: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    write_splade(tmp_path, **fields)
    with pytest.raises(EngineStartError, match=message):
        LLM(str(tmp_path), **OPTIONS)


def test_long_texts_have_no_mean(tmp_path: Path) -> None:
    make("bert", tmp_path)
    config = {"enable_chunked_processing": True}
    with (
        LLM(str(tmp_path), **OPTIONS, **OF_VLLM, pooler_config=config) as llm,
        pytest.raises(RequestError, match="not possible with sparse vectors"),
    ):
        llm.embed(ASKED, use_tqdm=False)


@pytest.mark.slow
def test_the_records_of_a_command(tmp_path: Path) -> None:
    make("bert", tmp_path)
    rewrite_config(tmp_path, **OF_VLLM["hf_overrides"])
    source = tmp_path / "texts.txt"
    source.write_text("7 8\n9\n")
    options = ["-m", str(tmp_path), "-i", str(source)]
    found = command("embed", *options)
    assert found.returncode == 0, found.stderr
    with LLM(str(tmp_path), **OPTIONS) as llm:
        wanted = [each.outputs.sparse for each in llm.embed(["7 8", "9"], use_tqdm=False)]
    records = [json.loads(line) for line in found.stdout.splitlines()]
    for record, sparse in zip(records, wanted, strict=True):
        assert record["embedding"] == {"indices": [*sparse], "values": [*sparse.values()]}
    refused = command("embed", *options, "-o", str(tmp_path / "out.npy"))
    assert refused.returncode != 0
    assert b"sparse vectors are written to .jsonl" in refused.stderr
