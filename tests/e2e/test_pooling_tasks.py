"""Classes, scores, rows of tokens and long texts of random encoders equal what torch computes with
transformers' models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.encoder_tokenizers import transformers_tokenizer

from shmllm import (
    LLM,
    AsyncLLM,
    LateChunkingParams,
    LateInteractionParams,
    PoolingParams,
    RequestError,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TOLERANCE = 1e-5
LENGTH = 48
WEIGHT_SCALE = 3.0
QUERY = "what is the capital of France?"
TEXTS = ["Paris is the largest city of France.", "The quick brown fox", "a dog", "中 café"]
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


@dataclass(frozen=True)
class Encoder:
    """A random encoder.

    Attributes:
        directory: its files.
        model: transformers' model.
        tokenizer: transformers' tokenizer.
    """

    directory: Path
    model: Any
    tokenizer: Any

    @torch.inference_mode()
    def logits(self, *texts: str, **options: Any) -> torch.Tensor:
        """The logits of a text or a pair: of the prompt, or of its tokens."""
        logits: torch.Tensor = self.model(**self._inputs(*texts, **options)).logits[0]
        return logits

    @torch.inference_mode()
    def states(self, ids: list[int]) -> torch.Tensor:
        """The hidden states of tokens, [tokens, width]."""
        encoder = self.model.base_model
        states: torch.Tensor = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return states

    def _inputs(self, *texts: str, **options: Any) -> Any:
        return self.tokenizer(*texts, return_tensors="pt", **options)

    def start(self, **options: Any) -> LLM:
        return LLM(str(self.directory), multiprocess=False, num_threads=1, **options)


def make_encoder(directory: Path, suffix: str, **config: Any) -> Encoder:
    torch.manual_seed(11)
    model = getattr(transformers, f"Bert{suffix}")(
        transformers.BertConfig(
            vocab_size=200,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            **config,
        )
    ).eval()
    for weight in model.parameters():
        weight.data *= WEIGHT_SCALE if weight.ndim > 1 else 1.0
    model.save_pretrained(directory)
    tokenizer = transformers_tokenizer("bert", model_input_names=INPUTS)
    tokenizer.save_pretrained(directory)
    return Encoder(directory, model, tokenizer)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """One without a head."""
    return make_encoder(tmp_path_factory.mktemp("encoder"), "Model")


@pytest.fixture
def llm(encoder: Encoder) -> Iterator[LLM]:
    with encoder.start() as llm:
        yield llm


def close(ours: Any, reference: torch.Tensor) -> None:
    given = torch.as_tensor(ours, dtype=torch.float32)
    torch.testing.assert_close(given, reference, atol=TOLERANCE, rtol=0)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3}, lambda logits: logits.softmax(-1)),
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda logits: logits),
    ],
)
def test_classify(
    tmp_path: Path, config: dict[str, Any], activation: Callable[[Any], torch.Tensor]
) -> None:
    own = make_encoder(tmp_path, "ForSequenceClassification", **config)
    logits = [own.logits(text) for text in TEXTS]
    with own.start() as llm:
        outputs = llm.classify(TEXTS, use_tqdm=False)
        for output, wanted in zip(outputs, logits, strict=True):
            assert output.outputs.num_classes == config["num_labels"]
            close(output.outputs.probs, activation(wanted))
        raw = PoolingParams(use_activation=False)
        for output, wanted in zip(llm.encode(TEXTS, raw, use_tqdm=False), logits, strict=True):
            close(output.outputs.data, wanted)
        assert len(llm.facts.pooling.labels) == config["num_labels"]
    calibrated = {"logit_mean": 0.25, "logit_sigma": 2.0}
    with own.start(pooler_config=calibrated) as llm:
        output = llm.classify(TEXTS[0], use_tqdm=False)[0]
        close(output.outputs.probs, activation((logits[0] - 0.25) / 2))


def test_classes_of_tokens_and_of_steps(tmp_path: Path) -> None:
    own = make_encoder(tmp_path, "ForTokenClassification", num_labels=4)
    with own.start() as llm:
        outputs = llm.encode(TEXTS, use_tqdm=False)
        for output, text in zip(outputs, TEXTS, strict=True):
            close(output.outputs.data, own.logits(text).softmax(-1))
    the = own.tokenizer.convert_tokens_to_ids("the")
    steps = {"pooling_type": "STEP", "step_tag_id": the, "returned_token_ids": [3, 1]}
    with own.start(pooler_config=steps) as llm:
        text = "the quick fox and the dog and the fox"
        ids = torch.tensor(own.tokenizer(text)["input_ids"])
        wanted = own.logits(text)[ids == the]
        assert len(wanted) == 3
        output = llm.encode(text, use_tqdm=False)[0]
        close(output.outputs.data, wanted[:, [3, 1]].softmax(-1))
        all_rows = PoolingParams(pooling_type="ALL")
        with pytest.raises(RequestError, match="only supports"):
            llm.encode(text, PoolingParams(pooling_type="ALL", step_tag_id=the), use_tqdm=False)
        assert llm.encode(text, all_rows, use_tqdm=False)[0].outputs.array.shape == (len(ids), 4)


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    own = make_encoder(tmp_path, "ForSequenceClassification", num_labels=1)
    with own.start() as llm:
        for queries in (QUERY, [*reversed(TEXTS)]):
            outputs = llm.score(queries, TEXTS, use_tqdm=False)
            pairs = [(queries, text) for text in TEXTS]
            if isinstance(queries, list):
                pairs = [*zip(queries, TEXTS, strict=True)]
            wanted = [own.logits(*pair).sigmoid() for pair in pairs]
            close([[output.outputs.score] for output in outputs], torch.stack(wanted))
            for output, pair in zip(outputs, pairs, strict=True):
                assert output.prompt_token_ids == own.tokenizer(*pair)["input_ids"]
        long = "the quick brown fox " * 20
        with pytest.raises(RequestError, match=f"pair 1 has .* tokens; .*at most {LENGTH}"):
            llm.score(QUERY, [TEXTS[0], long], use_tqdm=False)
        for kept in (20, -1):
            output = llm.score(QUERY, long, truncate_prompt_tokens=kept, use_tqdm=False)[0]
            cut = {"truncation": True, "max_length": kept if kept > 0 else LENGTH}
            close([output.outputs.score], own.logits(QUERY, long, **cut).sigmoid())
        params = PoolingParams(extra_kwargs={"max_tokens_per_doc": 6}, use_activation=False)
        output = llm.score(QUERY, long, pooling_params=params, use_tqdm=False)[0]
        short = "the quick brown fox the quick"
        length = len(own.tokenizer(short, add_special_tokens=False)["input_ids"])
        params.extra_kwargs = {"max_tokens_per_doc": length}
        output = llm.score(QUERY, long, pooling_params=params, use_tqdm=False)[0]
        close([output.outputs.score], own.logits(QUERY, short))


def test_a_cross_encoder_reads_what_a_chat_template_writes(tmp_path: Path) -> None:
    own = make_encoder(tmp_path, "ForSequenceClassification", num_labels=1)
    template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    with own.start() as llm:
        output = llm.score("a fox", "a dog", chat_template=template, use_tqdm=False)[0]
        close([output.outputs.score], own.logits("query : a fox document : a dog ").sigmoid())


def make_decoder(directory: Path, kind: str) -> tuple[Any, Any]:
    """Write a random decoder; return transformers' model and tokenizer."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        num_labels=1,
    )
    model = getattr(transformers, f"Qwen3For{kind}")(config).eval()
    for weight in model.parameters():
        weight.data *= WEIGHT_SCALE if weight.ndim > 1 else 1.0
    model.save_pretrained(directory)
    tokenizer = transformers_tokenizer("gpt")
    tokenizer.add_tokens(["no", "yes"])
    tokenizer.save_pretrained(directory)
    return model, tokenizer


@torch.inference_mode()
def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits if logits.ndim == 1 else logits[-1]


def test_a_decoder_reads_the_texts_of_a_pair_one_behind_the_other(tmp_path: Path) -> None:
    model, tokenizer = make_decoder(tmp_path, "SequenceClassification")
    with LLM(str(tmp_path), multiprocess=False, num_threads=1) as llm:
        for output, text in zip(llm.score(QUERY, TEXTS, use_tqdm=False), TEXTS, strict=True):
            assert output.prompt_token_ids == tokenizer(QUERY, text)["input_ids"]
            wanted = last_logits(model, output.prompt_token_ids).sigmoid()
            close([output.outputs.score], wanted)


def test_a_chat_model_answers_yes_or_no(tmp_path: Path) -> None:
    model, tokenizer = make_decoder(tmp_path, "CausalLM")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    template = "{% for m in messages %}<{{ m.role }}>: {{ m.content }}\n{% endfor %}"
    answers = tokenizer.convert_tokens_to_ids(["no", "yes"])

    def wanted(prompt: str) -> torch.Tensor:
        logits = last_logits(model, tokenizer(prompt)["input_ids"])
        return logits[answers].softmax(-1)[1:]

    with LLM(str(tmp_path), multiprocess=False, num_threads=1, hf_overrides=overrides) as llm:
        for output, text in zip(llm.score(QUERY, TEXTS, use_tqdm=False), TEXTS, strict=True):
            assert output.prompt == QUERY + text
            close([output.outputs.score], wanted(QUERY + text))
        outputs = llm.score(QUERY, TEXTS, chat_template=template, use_tqdm=False)
        for output, text in zip(outputs, TEXTS, strict=True):
            close([output.outputs.score], wanted(f"<query>: {QUERY}\n<document>: {text}\n"))


def test_what_a_model_has_no_scores_or_tokens_for(tmp_path: Path) -> None:
    own = make_encoder(tmp_path, "ForSequenceClassification", num_labels=2)
    with own.start() as llm:
        for call, message in (
            (lambda: llm.score("a", "b"), "only enabled for num_labels == 1. .*LABEL_0, LABEL_1"),
            (lambda: llm.embed("a"), "Embedding API is not supported by this model"),
            (lambda: llm.generate("a"), r"LLM.generate\(\) is only supported for generative"),
            (lambda: llm.score_tokens(["a"], [[1]]), "only supported for generative models"),
            (lambda: llm.chat([{"role": "user", "content": "a"}]), r"LLM.chat\(\) is only"),
            (lambda: llm.encode("a", pooling_task="plugin"), "takes a prompt of"),
        ):
            with pytest.raises(RequestError, match=message):
                call()
        assert len(llm.classify("a", use_tqdm=False)[0].outputs.probs) == 2
        assert (llm.model_config.runner_type, llm.model_config.embedding_size) == ("pooling", 64)


def test_an_engine_that_generates_only_refuses_to_pool() -> None:
    options = {"kv_cache_memory_bytes": 2**26, "max_model_len": 64}
    with (
        LLM(runner="generate", multiprocess=False, **options) as llm,
        pytest.raises(RequestError, match=r"for pooling models.*runner='generate'"),
    ):
        llm.embed("a")


def test_embeddings_of_tokens(encoder: Encoder, llm: LLM) -> None:
    outputs = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    for output in outputs:
        close(output.outputs.data, unit(encoder.states(output.prompt_token_ids)))
    raw = PoolingParams(use_activation=False)
    one = llm.encode(TEXTS[0], raw, pooling_task="token_embed", use_tqdm=False)[0]
    close(one.outputs.data, encoder.states(one.prompt_token_ids))


def max_sim(encoder: Encoder, query: str, document: str) -> float:
    one, other = (
        unit(encoder.states(encoder.tokenizer(t)["input_ids"])) for t in (query, document)
    )
    return float((one @ other.T).amax(-1).sum())


def test_late_interaction(encoder: Encoder) -> None:
    with encoder.start(pooler_config={"task": "token_embed"}) as llm:
        wanted = [max_sim(encoder, QUERY, text) for text in TEXTS]
        outputs = llm.score(QUERY, TEXTS, use_tqdm=False)
        assert [output.outputs.score for output in outputs] == pytest.approx(wanted, abs=1e-4)
        pairs = llm.score(TEXTS, [*reversed(TEXTS)], use_tqdm=False)
        wanted_pairs = [max_sim(encoder, a, b) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
        assert [pair.outputs.score for pair in pairs] == pytest.approx(wanted_pairs, abs=1e-4)
        alone = [llm.score(QUERY, text, use_tqdm=False)[0].outputs.score for text in TEXTS]
        assert alone == [output.outputs.score for output in outputs]
        query = PoolingParams(
            late_interaction_params=LateInteractionParams("cache_query", "q", len(TEXTS))
        )
        score = PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "q"))
        params = [query, *[score] * len(TEXTS)]
        results = llm.encode([QUERY, *TEXTS], params, use_tqdm=False)
        assert [float(each.outputs.data) for each in results] == pytest.approx([0, *alone])
        missing = llm.encode(TEXTS[0], score, use_tqdm=False)[0]
        assert "query cache miss for key 'q'" in (missing.error or "")
        with pytest.raises(RequestError, match="chat_template is for models that read a pair"):
            llm.score("a", "b", chat_template="{{ messages }}")


def test_late_chunking(encoder: Encoder, llm: LLM) -> None:
    text = "The quick brown fox: 中文 café jumps over the lazy dog."
    for size, activation in ((1, None), (3, False), (4, True), (100, None)):
        params = PoolingParams(
            use_activation=activation,
            late_chunking_params=LateChunkingParams(size),
            skip_reading_prefix_cache=False,
        )
        output = llm.encode(text, params, pooling_task="token_embed", use_tqdm=False)[0]
        assert output.prompt_token_ids == encoder.tokenizer(text)["input_ids"]
        parts = encoder.states(output.prompt_token_ids).split(size)
        wanted = torch.stack([part.mean(0) for part in parts])
        close(output.outputs.data, wanted if activation is False else unit(wanted))
        assert output.late_chunking is not None
        assert len(output.late_chunking.chunks) == len(wanted)
        assert output.late_chunking.input_tokens == len(output.prompt_token_ids)
    with pytest.raises(RequestError, match="Late chunking does not support truncation"):
        llm.encode(text, params, pooling_task="token_embed", truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="requires token_embed"):
        llm.encode(text, params, pooling_task="embed")


def test_long_texts_are_divided_refused_or_cut(encoder: Encoder) -> None:
    text = "the quick brown fox " * 30
    ids = encoder.tokenizer(text)["input_ids"]
    vectors = [unit(encoder.states(ids[i : i + LENGTH])[0]) for i in range(0, len(ids), LENGTH)]
    weights = [len(ids[i : i + LENGTH]) for i in range(0, len(ids), LENGTH)]
    mean = sum(w * v for w, v in zip(weights, vectors, strict=True)) / len(ids)
    with encoder.start(pooler_config={"enable_chunked_processing": True}) as llm:
        long, short = llm.embed([text, TEXTS[0]], use_tqdm=False)
        close(long.outputs.embedding, unit(mean))
        assert (long.prompt_token_ids, long.prompt) == (ids, text)
        cut = llm.embed(text, truncate_prompt_tokens=LENGTH, use_tqdm=False)[0]
        assert len(cut.prompt_token_ids) == LENGTH
        with pytest.raises(RequestError, match=f"at most {LENGTH}"):
            llm.encode(text, pooling_task="token_embed", use_tqdm=False)
    with encoder.start(pooler_config={"max_embed_len": 20}) as llm:
        assert llm.embed(TEXTS[0], use_tqdm=False)[0] == short_as(short, "0")
        with pytest.raises(RequestError, match=f"prompt 1 has {len(ids)} tokens; .* is 20"):
            llm.embed([TEXTS[0], text], use_tqdm=False)
        cut = llm.embed(text, truncate_prompt_tokens=-1, use_tqdm=False)[0]
        assert cut.prompt_token_ids == [*ids[:19], ids[-1]]


def short_as(output: Any, request_id: str) -> Any:
    output.request_id = request_id
    return output


def test_prompts_by_name_are_left_out_of_means(tmp_path: Path) -> None:
    own = make_encoder(tmp_path, "Model")
    pooling = {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": False}
    modules = [("", "Transformer", {}), ("1_Pooling", "Pooling", pooling)]
    described = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind, _) in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(described))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "the fox : ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with own.start() as llm:
        named = llm.embed(TEXTS, prompt_name="query", use_tqdm=False)
        skipped = len(own.tokenizer("the fox : ")["input_ids"]) - 1
        for output, text in zip(named, TEXTS, strict=True):
            ids = own.tokenizer(f"the fox : {text}")["input_ids"]
            assert output.prompt_token_ids == ids
            close(output.outputs.embedding, own.states(ids)[skipped:].mean(0))
        plain = llm.embed(TEXTS, use_tqdm=False)
        for output, text in zip(plain, TEXTS, strict=True):
            close(output.outputs.embedding, own.states(own.tokenizer(text)["input_ids"]).mean(0))
        with pytest.raises(RequestError, match=r"'passage' is not .*'query', 'document'"):
            llm.embed("a", prompt_name="passage")
    with own.start(pooler_config={"enable_chunked_processing": True}) as llm:
        text = "the quick brown fox " * 15
        output = llm.embed(text, prompt_name="query", use_tqdm=False)[0]
        first, second = output.prompt_token_ids[:LENGTH], output.prompt_token_ids[LENGTH:]
        means = own.states(first)[skipped:].mean(0), own.states(second).mean(0)
        wanted = (means[0] * len(first) + means[1] * len(second)) / len(output.prompt_token_ids)
        close(output.outputs.embedding, wanted)


def test_coroutines_get_the_same(encoder: Encoder) -> None:
    text = "the quick brown fox " * 30
    options: dict[str, Any] = {"pooler_config": {"enable_chunked_processing": True}}
    chunks = PoolingParams(late_chunking_params=LateChunkingParams(3))
    query = PoolingParams(late_interaction_params=LateInteractionParams("cache_query", "q"))
    score = PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "q"))

    async def run() -> list[Any]:
        async with AsyncLLM(str(encoder.directory), **options) as llm:

            async def encode(prompt: str, *args: Any, **given: Any) -> Any:
                (output,) = [each async for each in llm.encode(prompt, *args, **given)]
                return output

            first = await encode(QUERY, query, pooling_task="token_embed")
            assert first.outputs.array.shape == ()
            with pytest.raises(RequestError, match="Classification API is not supported"):
                await encode("a", pooling_task="classify")
            return [
                await encode(text, None, "long"),
                await encode(TEXTS[0], score, pooling_task="token_embed"),
                await encode(TEXTS[0], chunks, pooling_task="token_embed"),
                await encode(text, pooling_task="token_embed", truncate_prompt_tokens=-1),
            ]

    long, scored, chunked, tokens = asyncio.run(run())
    assert long.request_id == "long"
    assert float(scored.outputs.array) == pytest.approx(max_sim(encoder, QUERY, TEXTS[0]))
    with encoder.start(**options) as llm:
        assert llm.encode(text, use_tqdm=False)[0].outputs == long.outputs
        task = {"pooling_task": "token_embed", "use_tqdm": False}
        assert llm.encode(TEXTS[0], chunks, **task)[0].late_chunking == chunked.late_chunking
        assert llm.encode(text, truncate_prompt_tokens=-1, **task)[0].outputs == tokens.outputs
