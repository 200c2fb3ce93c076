"""Rerankers that read pairs of texts and images: scores are those of transformers' Qwen 2 VL and
projections behind it, for which transformers has no class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.image_llms import prepared_of
from support.image_text_models import prompt_of, some_images
from support.pooling_models import draw, rewrite_config
from support.vision_models import image_token, joined_inputs, make_vision_model
from tokenizers import Tokenizer

from shmllm import LLM, PoolingParams, RequestError

OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "multiprocess": False,
    "dtype": "float32",
    "max_model_len": 256,
}
SCORED, MEAN = 100, 2.65
IMAGES = some_images()
PAIRS: list[tuple[Any, Any]] = [
    ("a question", "an {answer}"),
    ("a question", IMAGES[0]),
    (IMAGES[1], "an answer"),
    (IMAGES[2], IMAGES[0]),
]


class Reranker:
    """Qwen 2 VL and two projections, and the directory of both."""

    def __init__(self, directory: Path) -> None:
        self.vlm = make_vision_model("qwen2_vl", directory)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        draw(self.score)
        tensors = load_file(directory / "model.safetensors")
        tensors |= {f"score.{name}": each for name, each in self.score.state_dict().items()}
        save_file(tensors, directory / "model.safetensors")
        rewrite_config(directory, architectures=["JinaVLForRanking"])

    @torch.inference_mode()
    def logit(self, llm: LLM, ids: list[int], images: list[Image.Image]) -> float:
        inputs = joined_inputs("qwen2_vl", prepared_of(llm, images)) if images else {}
        tokens = torch.tensor([ids])
        is_image = (tokens == image_token(self.vlm)).long()
        states = self.vlm.model(tokens, mm_token_type_ids=is_image, **inputs).last_hidden_state
        return float(self.score(states[0, -1]))


def test_scores_of_texts_and_images_equal_transformers(tmp_path: Path) -> None:
    model = Reranker(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw = PoolingParams(use_activation=False)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        queries = [prompt_of(query) for query, _ in PAIRS]
        documents = [prompt_of(document) for _, document in PAIRS]
        found = llm.score(queries, documents, use_tqdm=False)
        logits = llm.score(queries, documents, pooling_params=raw, use_tqdm=False)
        for (query, document), score, logit in zip(PAIRS, found, logits, strict=True):
            images = [each for each in (document, query) if isinstance(each, Image.Image)]
            ids = list(score.prompt_token_ids)
            wanted = model.logit(llm, ids, images) - MEAN
            assert logit.outputs.score == pytest.approx(wanted, rel=1e-4)
            assert score.outputs.score == pytest.approx(
                float(torch.tensor(wanted).sigmoid()), rel=1e-4
            )
            assert ids[-1] == SCORED
        page = {"type": "image_pil", "image_pil": IMAGES[0]}
        words = {"type": "text", "text": "a question"}
        (parts,) = llm.score({"content": [words]}, {"content": [page]}, use_tqdm=False)
        assert parts.outputs.score == found[1].outputs.score
        text = tokenizer.decode(list(found[0].prompt_token_ids)[:-1])
        assert text == "**Document**:\nan {answer}\n**Query**:\na question"
        (cut,) = llm.score("a question", "b " * 99, truncate_prompt_tokens=20, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 20
        assert cut.prompt_token_ids[-1] == SCORED
        wrong = {"prompt": "a", "multi_modal_uuids": {"image": ["x"]}}
        for document, error in (
            (wrong, "document 0 must be a text, or have 'prompt' and 'multi_modal_data'"),
            ([1, 2], "document 0 must be a text"),
            ({"content": []}, "document 0 must be a text"),
            ({"content": "a"}, "document 0: 'content' must be a list of parts"),
            ({"content": [page, {"type": "x"}]}, "document 0: a part of 'content' must be a text"),
            ({"content": [{"type": "image_url", "image_url": "x"}]}, "document 0: messages"),
        ):
            with pytest.raises(RequestError, match=error):
                llm.score("a", document, use_tqdm=False)
