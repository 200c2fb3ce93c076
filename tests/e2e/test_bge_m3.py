"""Vectors and weights of BGE-M3 equal its authors' formulas: the first token's state, a projection
of each token but the first, and the ReLU of one to a number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.pickled import pickle_weights
from support.pooling_models import (
    assert_vectors_close,
    draw,
    make_pooling_model,
    pooling_prompts,
    write_tokenizer,
)

from shmllm import LLM, EngineStartError, LateChunkingParams, PoolingParams, RequestError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {
    "multiprocess": False,
    "num_threads": 1,
    "kv_cache_memory_bytes": 2**24,
    "hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]},
}
PROMPTS = [[0, *prompt, 2] for prompt in pooling_prompts(100)]
ASKED = [{"prompt_token_ids": prompt} for prompt in PROMPTS]


class Model:
    """A random BGE-M3: its directory, an engine, and what it consists of."""

    def __init__(self, directory: Path) -> None:
        self.encoder = make_pooling_model(
            "xlm_roberta", "Model", directory, bos_token_id=0, eos_token_id=2
        )
        write_tokenizer(directory)
        self.heads = {"colbert_linear": torch.nn.Linear(64, 64)}
        self.heads["sparse_linear"] = torch.nn.Linear(64, 1)
        for head in self.heads.values():
            draw(head)
            head.bias.data.mul_(0.1)  # so that weights have both signs
        save_file(
            self.heads["colbert_linear"].state_dict(), directory / "colbert_linear.safetensors"
        )
        torch.save(self.heads["sparse_linear"].state_dict(), directory / "sparse_linear.pt")
        pickle_weights(directory)
        self.llm = LLM(str(directory), **OPTIONS)

    @torch.inference_mode()
    def states(self) -> list[torch.Tensor]:
        return [self.encoder(torch.tensor([each])).last_hidden_state[0] for each in PROMPTS]

    @torch.inference_mode()
    def of_tokens(self, head: str) -> list[torch.Tensor]:
        return [self.heads[head](states) for states in self.states()]

    def asked(self, task: str, **params: Any) -> list[np.ndarray]:
        outputs = self.llm.encode(ASKED, PoolingParams(**params), pooling_task=task, use_tqdm=False)
        return [each.outputs.array for each in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("bge_m3"))
    with made.llm:
        yield made


def test_the_dense_vector_is_the_first_token_s(model: Model) -> None:
    wanted = [F.normalize(states[0], dim=0) for states in model.states()]
    assert_vectors_close(model.asked("embed"), wanted, 1e-5)


def test_all_tokens_but_the_first_have_vectors(model: Model) -> None:
    rows = [each[1:] for each in model.of_tokens("colbert_linear")]
    wanted = [F.normalize(each, dim=1) for each in rows]
    assert_vectors_close(model.asked("token_embed"), wanted, 1e-5)
    assert_vectors_close(model.asked("token_embed", use_activation=False), rows, 1e-5)


def test_tokens_between_the_ends_have_weights(model: Model) -> None:
    logits = [each[1:-1, 0] for each in model.of_tokens("sparse_linear")]
    assert_vectors_close(model.asked("token_classify", use_activation=False), logits, 1e-5)
    found, wanted = np.concatenate(model.asked("token_classify")), torch.cat(logits).relu().numpy()
    assert 0 < np.count_nonzero(found) < len(found)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * wanted.max())


def test_other_texts_have_all_rows(model: Model) -> None:
    shapes = {}
    for prompt in ([7, 8, 9], [0, 2], [2, 0]):
        for task in ("token_embed", "token_classify"):
            outputs = model.llm.encode(
                [{"prompt_token_ids": prompt}], pooling_task=task, use_tqdm=False
            )
            shapes[tuple(prompt), task] = outputs[0].outputs.array.shape
    assert list(shapes.values()) == [(3, 64), (3,), (1, 64), (0,), (2, 64), (2,)]


def test_what_requests_cannot_ask_for(model: Model) -> None:
    with pytest.raises(RequestError, match="have no late chunking"):
        model.asked("token_embed", late_chunking_params=LateChunkingParams(chunk_size=4))
    with pytest.raises(RequestError, match="no pooling type but ALL"):
        model.asked("token_classify", pooling_type="STEP", step_tag_id=3)
    with pytest.raises(RequestError, match="'classify' is not possible"):
        model.llm.classify(ASKED, use_tqdm=False)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    make_pooling_model("xlm_roberta", "Model", tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(EngineStartError, match=r"neither colbert_linear\.safetensors nor"):
        LLM(str(tmp_path), **OPTIONS)
