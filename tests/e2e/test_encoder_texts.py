"""Encoder-decoders of texts: transformers' tokens, equal bits in all settings, forms of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from support.commands import command
from support.determinism import said
from support.encoder_texts import (
    LANGUAGES,
    LENGTH,
    OF_GEMMA,
    RECIPES,
    make_classifier,
    make_encoder_decoder,
    reference_tokens,
)
from support.one_thread import one_thread
from support.pickled import pickle_weights
from support.variants import slow

from shmllm import (
    LLM,
    BeamSearchParams,
    EngineStartError,
    LoRARequest,
    RequestError,
    SamplingParams,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 2},
    "few blocks": {
        "num_gpu_blocks_override": 13,
        "scheduler_reserve_full_isl": False,
        "max_num_seqs": 3,
        "block_size": 16,
    },
    "no cache": {"enable_prefix_caching": False},
    "two threads": {"num_threads": 2},
}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
_DRAW = np.random.default_rng(0)
TEXTS: list[list[int]] = [_DRAW.integers(5, 290, n).tolist() for n in (1, 3, 17, 40, LENGTH)]


CAPLESS = OF_GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}


class Subject(NamedTuple):
    """A model, and its directory."""

    model: Any
    directory: Path

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text, with those of the tokenizer's template or without."""
        tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        found: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return found


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("m2m")
    return Subject(make_encoder_decoder(directory, "m2m_100"), directory)


@pytest.fixture(scope="module")
def llm(subject: Subject) -> Iterator[LLM]:
    with LLM(str(subject.directory), **BASE) as llm:
        yield llm


@pytest.mark.parametrize("name", RECIPES)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder_decoder(tmp_path, name)
    begin = [model.config.decoder_start_token_id]
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    others = [{"encoder_prompt": text, "decoder_prompt": [*begin, 7, 8, 9]} for text in TEXTS]
    with LLM(str(tmp_path), **BASE) as llm:
        outputs = llm.generate([*prompts, *others], PARAMS, use_tqdm=False)
    for output, text, more in zip(outputs, TEXTS * 2, [()] * 5 + [(7, 8, 9)] * 5, strict=True):
        assert output.prompt_token_ids == [*begin, *more]
        assert output.encoder_prompt_token_ids == text
        wanted = reference_tokens(model, text, [*begin, *more], PARAMS.max_tokens)
        assert output.outputs[0].token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bart", {"activation_function": "relu"}),
        ("bart", {"encoder_attention_heads": 8, "encoder_layers": 3, "encoder_ffn_dim": 40}),
        ("m2m_100", {"scale_embedding": False, "activation_function": "gelu"}),
        ("t5", {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-3}),
        ("t5", {"d_kv": 8, "num_heads": 6, "num_decoder_layers": None}),
        ("umt5", {"feed_forward_proj": "relu"}),
        ("t5gemma", {"tie_word_embeddings": True, "decoder": CAPLESS | {"hidden_size": 64}}),
        ("t5gemma", {"encoder": CAPLESS | {"attention_bias": True, "num_key_value_heads": 4}}),
    ],
    ids=str,
)
def test_greedy_tokens_of_variants(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    model = make_encoder_decoder(tmp_path, name, **fields)
    begin = [model.config.decoder_start_token_id]
    with LLM(str(tmp_path), **BASE) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in TEXTS], PARAMS)
    for output, text in zip(outputs, TEXTS, strict=True):
        assert output.outputs[0].token_ids == reference_tokens(model, text, begin, 10)


@pytest.mark.parametrize("name", ["bart", slow("m2m_100"), slow("t5"), slow("t5gemma")])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        slow({"dtype": "bfloat16"}),
        slow({"kv_cache_dtype": "int8"}),
        slow({"quantization": "int8"}),
        slow({"speculative_config": {"method": "ngram"}}),
    ],
)
def test_bits_do_not_depend_on_settings(name: str, variant: dict[str, Any], tmp_path: Path) -> None:
    make_encoder_decoder(tmp_path, name)
    prompts = [
        {"encoder_prompt": text, "decoder_prompt": [2, *range(20, 20 + 5 * number)]}
        for number, text in enumerate(TEXTS * 2)
    ]
    found = {}
    for key, setting in SETTINGS.items():
        with LLM(str(tmp_path), **BASE | setting | variant) as llm:
            together = [*map(said, llm.generate(prompts, PARAMS, use_tqdm=False))]
            alone = [said(llm.generate(each, PARAMS, use_tqdm=False)[0]) for each in prompts[::3]]
            assert together[::3] == alone, key
            found[key] = together
    assert all(each == found["whole"] for each in found.values())


def test_forms_of_prompts(subject: Subject, llm: LLM) -> None:
    """A prompt in one part is the encoder's, and the decoder begins as the model's files say."""
    text, ids = "some words", subject.ids("some words")
    given: list[Any] = [
        text,
        {"prompt": text},
        ids,
        {"encoder_prompt": text, "decoder_prompt": None},
        {"encoder_prompt": {"prompt": text, "multi_modal_data": None}, "decoder_prompt": ""},
        {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": [2]},
        {"encoder_prompt": ids, "decoder_prompt": {"prompt_token_ids": []}},
    ]
    outputs = llm.generate(given, PARAMS, use_tqdm=False)
    first, *others = map(said, outputs)
    assert all(other == first for other in others)
    assert {tuple(each.prompt_token_ids) for each in outputs} == {(2,)}
    assert all(each.encoder_prompt_token_ids == ids for each in outputs)
    assert [each.encoder_prompt for each in outputs] == [
        *(text, text, None, text, text, None, None)
    ]
    assert all(each.prompt is None for each in outputs)


def test_a_prompt_of_the_decoder_begins_with_the_models_token(subject: Subject, llm: LLM) -> None:
    (language,) = subject.ids(LANGUAGES[1], special=False)
    (output,) = llm.generate(
        {"encoder_prompt": "some words", "decoder_prompt": LANGUAGES[1]}, PARAMS, use_tqdm=False
    )
    assert output.prompt_token_ids == [2, language]
    assert output.prompt == LANGUAGES[1]
    wanted = reference_tokens(subject.model, subject.ids("some words"), [2, language], 10)
    assert output.outputs[0].token_ids == wanted


def test_a_text_may_begin_with_its_language(subject: Subject, llm: LLM) -> None:
    """It takes the place of the one that the tokenizer writes there."""
    (output,) = llm.generate(f"{LANGUAGES[1]} some words", PARAMS, use_tqdm=False)
    english, *behind = subject.ids(" some words")
    (french,) = subject.ids(LANGUAGES[1], special=False)
    assert output.encoder_prompt_token_ids == [french, *behind]
    assert english != french


def test_what_the_decoder_is_forced_to_begin_with_is_a_part_of_its_prompt(tmp_path: Path) -> None:
    make_encoder_decoder(tmp_path, "bart")
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"forced_bos_token_id": 7, "decoder_start_token_id": 9}))
    for overrides, wanted in (
        ({}, [9, 7]),
        ({"forced_bos_token_id": 8}, [9, 8]),
        ({"forced_bos_token_id": None, "decoder_start_token_id": 5}, [5]),
    ):
        with LLM(str(tmp_path), **BASE, hf_overrides=overrides) as llm:
            assert llm.generate("x", PARAMS)[0].prompt_token_ids == wanted
    path.write_text(json.dumps(config | {"forced_bos_token_id": 512}))
    with pytest.raises(EngineStartError, match="'forced_bos_token_id' must"):
        LLM(str(tmp_path), **BASE)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"encoder_prompt": []}, "the model's encoder needs at least one token"),
        ("x" * LENGTH, f"has {LENGTH + 2} tokens, and the model's encoder reads at most {LENGTH}"),
        ([512], "has token id 512"),
        ({"encoder_prompt": [5, -1]}, "has token id -1"),
        ({"encoder_prompt": "x", "decoder_prompt": [512]}, "has token id 512"),
        ({"encoder_prompt": "x", "decoder_prompt": [2] * LENGTH}, f"max_model_len is {LENGTH}"),
        ({"encoder_prompt": "x", "prompt": "y"}, "has 'encoder_prompt' and the keys"),
        ({"encoder_prompt": {"prompt": 5}}, "'encoder_prompt': 'prompt' must be a str"),
        ({"encoder_prompt": {"encoder_prompt": "y"}}, "unknown keys \\['encoder_prompt'\\]"),
        ({"encoder_prompt": {}}, "neither a text nor 'multi_modal_data'"),
        ({"encoder_prompt": 5}, "'encoder_prompt' must be a str"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "the model takes no images"),
        ({"prompt_embeds": np.zeros((3, 32), np.float32)}, "has 'prompt_embeds'"),
        ("lone \ud800", "lone surrogate"),
    ],
    ids=repr,
)
def test_prompts_that_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt, "right"] if isinstance(prompt, str) else prompt, PARAMS)


def test_what_needs_a_text_alone_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the model is an encoder-decoder of texts"):
        llm.embed("x", use_tqdm=False)
    with pytest.raises(RequestError, match="writes no transcripts"):
        llm.transcribe(b"")
    with pytest.raises(RequestError, match="enable_lora"):
        llm.generate("x", PARAMS, lora_request=LoRARequest("a", 1, "nowhere"))
    with LLM("tiny", multiprocess=False) as other, pytest.raises(RequestError, match="reads text"):
        other.generate({"encoder_prompt": "x", "decoder_prompt": "y"})


def test_beams_share_what_the_encoder_has_computed(subject: Subject, llm: LLM) -> None:
    """The score of the best is the sum of its tokens' log-probabilities, and no text is encoded
    twice."""
    encoded = llm.get_metrics()["item_queries"] - llm.get_metrics()["item_hits"]
    (found,) = llm.beam_search(["other words"], BeamSearchParams(beam_width=3, max_tokens=6))
    again = llm.get_metrics()
    assert again["item_queries"] - again["item_hits"] == encoded + 1
    best = found.sequences[0]
    (scored,) = llm.score_tokens(
        [{"encoder_prompt": "other words", "decoder_prompt": [2]}], [best.tokens[1:]]
    )
    assert sum(scored) == pytest.approx(best.cum_logprob, abs=1e-4)


@one_thread()
def test_classes_equal_those_of_transformers(tmp_path: Path) -> None:
    """Encoder and decoder read the text, and the last token has its class."""
    model = make_classifier(tmp_path, "bart", num_labels=3, eos_token_id=300)
    texts = [[*text[:-1], 300] for text in TEXTS[1:]]
    with LLM(str(tmp_path), **BASE, max_num_batched_tokens=16) as llm:
        outputs = llm.classify([{"prompt_token_ids": text} for text in texts * 2], use_tqdm=False)
        (alone,) = llm.classify([{"prompt_token_ids": texts[2]}], use_tqdm=False)
        with pytest.raises(RequestError, match="does not end with the model's end-of-sequence"):
            llm.classify([{"prompt_token_ids": [5, 6]}])
        with pytest.raises(RequestError, match="the decoder reads the encoder's text"):
            llm.classify([{"encoder_prompt": "x", "decoder_prompt": "y"}])
        with pytest.raises(RequestError, match="only supported for generative models"):
            llm.generate("x")
    assert outputs[2].outputs.probs == alone.outputs.probs
    for output, text in zip(outputs, texts * 2, strict=True):
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([text])).logits.softmax(1)[0]
        np.testing.assert_allclose(output.outputs.probs, wanted, atol=1e-5)
    assert len({tuple(np.round(output.outputs.probs, 3)) for output in outputs}) == len(texts)


def test_command(subject: Subject, tmp_path: Path) -> None:
    """A line of a file may have a prompt for the decoder, in place of the command's."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "some words"},
        {"prompt": "some words", "decoder_prompt": LANGUAGES[0]},
        {"prompt_token_ids": subject.ids("some words")},
        {"prompt": "x" * 99},
        {"messages": [], "decoder_prompt": "x"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = "-m", str(subject.directory), "--dtype", "float32", "--temperature", "0"
    more = "--max-tokens", "5", "--decoder-prompt", LANGUAGES[1], "--token-ids", "--echo"
    done = command("generate", *engine, "-i", str(source), "-o", str(target), *more)
    assert done.returncode == 1, done.stderr
    records = {each["line"]: each for each in map(json.loads, target.read_text().splitlines())}
    text = subject.ids("some words")
    for line, language in ((1, 1), (2, 0), (3, 1)):
        begin = [2, *subject.ids(LANGUAGES[language], special=False)]
        wanted = reference_tokens(subject.model, text, begin, 5)
        assert records[line]["token_ids"] == wanted[: len(records[line]["token_ids"])]
        assert records[line]["num_prompt_tokens"] == 2
    assert [records[line]["prompt"] for line in (1, 2, 3)] == ["some words", "some words", None]
    assert f"reads at most {LENGTH}" in records[4]["error"]
    assert "'messages' and 'decoder_prompt' are both given" in records[5]["error"]
    done = command("generate", *engine, *more[:4], "--echo", "some words")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith(f"some words\n{LANGUAGES[1]}")
    refused = command("generate", *engine, "--chat", "--decoder-prompt", "x", "y")
    assert refused.returncode == 2
    assert b"--decoder-prompt cannot be used with chats" in refused.stderr


@pytest.mark.parametrize("name", ["marian", *map(slow, sorted({*RECIPES} - {"marian"}))])
def test_pickles_with_all_names_of_tied_weights_have_the_same_tokens(
    name: str, tmp_path: Path
) -> None:
    model = make_encoder_decoder(tmp_path, name)
    texts = [{"prompt_token_ids": text} for text in TEXTS[:2]]
    found = []
    for is_pickled in (False, True):
        if is_pickled:
            pickle_weights(tmp_path, model.state_dict())
        with LLM(str(tmp_path), **BASE) as llm:
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
