"""Beam search equals transformers' where the definitions agree, and a plain implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_thread import one_thread
from support.reference_models import make_model

from shmllm import LLM, BeamSearchParams, RequestError, StructuredOutputsParams
from shmllm.frontend.beam_search import score_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SMALL: dict[str, Any] = {"vocab_size": 4096, "num_hidden_layers": 2}
PROMPTS = [[5, 6, 7], [11] * 20, [100, 200, 300, 400, 500] * 5]
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("beams")
    return make_model("llama", directory, **SMALL), directory


@one_thread()
@torch.inference_mode()
def next_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(0)


def plain_beam_search(
    model: Any, prompt: list[int], params: BeamSearchParams, end_id: int
) -> list[tuple[list[int], float]]:
    """Beam search by vLLM's definition: [(tokens, score)], best first."""
    allowed = params.allowed_token_ids

    def score(tokens: list[int], total: float) -> float:
        return total / (len(tokens) - len(prompt)) ** params.length_penalty if total else 0.0

    beams, completed = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        found = []
        for tokens, total in beams:
            logprobs = next_logprobs(model, tokens)
            values, ids = logprobs.topk(2 * params.beam_width)
            if allowed is not None:
                ids = torch.tensor(sorted(set(allowed)))
                values = logprobs[ids]
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                successor = ([*tokens, token], total + value)
                is_end = token == end_id and not params.ignore_eos
                (completed if is_end else found).append(successor)
        found.sort(key=lambda each: score(*each), reverse=True)
        beams = found[: params.beam_width]
    both = sorted(completed + beams, key=lambda each: score(*each), reverse=True)
    return [(tokens, score(tokens, total)) for tokens, total in both[: params.beam_width]]


@pytest.mark.parametrize("setting", [{}, {"enable_prefix_caching": False, "multiprocess": False}])
def test_equals_transformers_where_no_sequence_ends(
    model: tuple[Any, Path], setting: dict[str, Any]
) -> None:
    reference, directory = model
    params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    with LLM(str(directory), **OPTIONS, **setting) as llm:
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        with torch.inference_mode():
            wanted = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=8,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        assert [sequence.tokens for sequence in output.sequences] == wanted.sequences.tolist()
        scores = [score_of(sequence, 1.0) for sequence in output.sequences]
        assert scores == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_equals_the_definition_also_where_sequences_end(
    model: tuple[Any, Path], length_penalty: float, ignore_eos: bool, tmp_path: Path
) -> None:
    reference, directory = model
    # An end token that is likely: a successor that the beams do meet.
    end_id = int(next_logprobs(reference, PROMPTS[0]).topk(2).indices[1])
    copy = tmp_path / "model"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(f'{{"eos_token_id": {end_id}}}')
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(
        config.replace('"eos_token_id": 0', f'"eos_token_id": {end_id}')
    )
    params = BeamSearchParams(3, 5, ignore_eos=ignore_eos, length_penalty=length_penalty)
    with LLM(str(copy), multiprocess=False, **OPTIONS) as llm:
        assert llm.facts.eos_token_ids == (end_id,)
        outputs = llm.beam_search(PROMPTS, params, concurrency_limit=2)
    some_end = False
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        wanted = plain_beam_search(reference, prompt, params, end_id)
        assert [sequence.tokens for sequence in output.sequences] == [t for t, _ in wanted]
        for sequence in output.sequences:
            ends = sequence.tokens[-1] == end_id and not ignore_eos
            assert sequence.finish_reason == ("stop" if ends else "length")
            some_end |= ends
            assert len(sequence.logprobs) == len(sequence.tokens) - len(prompt)
    assert some_end or ignore_eos or length_penalty > 0


@pytest.mark.parametrize("count", [5, 300])
def test_only_allowed_tokens_are_generated_with_the_scores_of_all(
    model: tuple[Any, Path], count: int
) -> None:
    """Of up to 128 allowed tokens all are scored; of more, those among the likeliest."""
    reference, directory = model
    likely = next_logprobs(reference, PROMPTS[0]).topk(600).indices[::2].tolist()
    params = BeamSearchParams(3, 4, ignore_eos=True, allowed_token_ids=[*likely[:count], likely[0]])
    with LLM(str(directory), multiprocess=False, max_logprobs=-1, **OPTIONS) as llm:
        (output,) = llm.beam_search([PROMPTS[0]], params)
    wanted = plain_beam_search(reference, PROMPTS[0], params, -1)
    found = [(sequence.tokens, sequence.cum_logprob / 4) for sequence in output.sequences]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [score for _, score in found] == pytest.approx([s for _, s in wanted], abs=1e-4)


def test_of_many_allowed_tokens_that_are_all_unlikely_the_likeliest_is_taken(
    model: tuple[Any, Path],
) -> None:
    reference, directory = model
    rare = (-next_logprobs(reference, PROMPTS[0])).topk(300).indices.tolist()
    params = BeamSearchParams(2, 1, ignore_eos=True, allowed_token_ids=rare)
    with LLM(str(directory), multiprocess=False, **OPTIONS) as llm:
        (output,) = llm.beam_search([PROMPTS[0]], params)
    (sequence,) = output.sequences
    assert sequence.tokens == [*PROMPTS[0], rare[-1]]


CHOICES = ["def f", "def go", "class", "import os", "x"]


def test_a_structured_output_is_the_best_of_all_that_match() -> None:
    """A beam as wide as the number of choices finds all, with the scores that each has alone."""
    params = BeamSearchParams(
        8, 12, structured_outputs=StructuredOutputsParams(choice=CHOICES), length_penalty=0.0
    )
    with LLM(multiprocess=False, **OPTIONS) as llm:
        (output,) = llm.beam_search(["\n"], params)
        texts = [sequence.text.removeprefix("\n") for sequence in output.sequences]
        assert {sequence.finish_reason for sequence in output.sequences} == {"stop"}
        assert set(texts) == set(CHOICES)
        for sequence in output.sequences:
            prompt = sequence.tokens[: -len(sequence.logprobs)]
            (scored,) = llm.score_tokens([prompt], [sequence.tokens[len(prompt) :]])
            assert sum(scored) == pytest.approx(sequence.cum_logprob, abs=1e-3)
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)


def test_a_structured_output_has_no_tokens_that_only_the_tokenizer_knows(tmp_path: Path) -> None:
    make_model("llama", tmp_path, **SMALL | {"vocab_size": 200})
    params = BeamSearchParams(2, 6, structured_outputs={"choice": ["the", "to"]})
    with LLM(str(tmp_path), multiprocess=False, **OPTIONS) as llm:
        (output,) = llm.beam_search([PROMPTS[0]], params)
    assert {sequence.finish_reason for sequence in output.sequences} == {"stop"}
    assert all(max(sequence.tokens) < 200 for sequence in output.sequences)


def test_json_of_beams_is_valid_and_uncommon_tokens_are_found() -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer"}, "name": {"type": "string", "maxLength": 4}},
        "required": ["size", "name"],
        "additionalProperties": False,
    }
    params = BeamSearchParams(
        2, 60, structured_outputs={"json": schema, "disable_any_whitespace": True}
    )
    with LLM(**OPTIONS) as llm:
        outputs = llm.beam_search(["a = ", "import os\n"], params, concurrency_limit=1)
    for output, prompt in zip(outputs, ["a = ", "import os\n"], strict=True):
        ended = [s for s in output.sequences if s.finish_reason == "stop"]
        assert ended
        for sequence in ended:
            assert set(json.loads(sequence.text.removeprefix(prompt))) == {"size", "name"}


def test_progress_counts_the_tokens_of_sequences() -> None:
    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.desc, self.done, self.is_closed = total, desc, 0, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.is_closed = True

    bars: list[Bar] = []
    with LLM(multiprocess=False, **OPTIONS) as llm:
        llm.beam_search(["a", "b", "c"], BeamSearchParams(2, 5), use_tqdm=Bar, concurrency_limit=2)
    (bar,) = bars
    assert (bar.total, bar.done, bar.is_closed) == (10, 10, True)


def test_text_and_the_end_of_the_context() -> None:
    with LLM(max_model_len=16, multiprocess=False, **OPTIONS) as llm:
        (output,) = llm.beam_search("def f(x):", BeamSearchParams(2, 40))
        assert len(output.sequences) == 2
        for sequence in output.sequences:
            assert sequence.text is not None
            assert sequence.text.startswith("def f(x):")
            assert len(sequence.tokens) <= 16
        longest = max(output.sequences, key=lambda sequence: len(sequence.tokens))
        assert len(longest.tokens) == 16
        assert longest.finish_reason == "length"


def test_a_temperature_adds_sampled_successors() -> None:
    with LLM(multiprocess=False, **OPTIONS) as llm:
        outputs = [
            llm.beam_search(["x = "], BeamSearchParams(2, 6, temperature=t)) for t in (0.0, 2.0)
        ]
        alternatives = [
            {len(step) for sequence in output[0].sequences for step in sequence.logprobs}
            for output in outputs
        ]
        assert alternatives[0] == {4}
        assert 5 in alternatives[1]


def test_bad_searches_are_refused_and_the_engine_lives() -> None:
    with LLM(multiprocess=False, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="beam_width of 11 needs 22 logprobs"):
            llm.beam_search(["a"], BeamSearchParams(11, 4))
        with pytest.raises(RequestError, match="takes a BeamSearchParams, got dict"):
            llm.beam_search(["a"], {"beam_width": 2})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="not prompt_embeds"):
            llm.beam_search({"prompt_embeds": torch.zeros(2, 256)}, BeamSearchParams(2, 2))
        with pytest.raises(RequestError, match="allowed_token_ids has 10000000"):
            llm.beam_search(["a"], BeamSearchParams(2, 2, allowed_token_ids=[10_000_000]))
        with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
            llm.beam_search(["a"], BeamSearchParams(2, 2, structured_outputs={"regex": "("}))
        with pytest.raises(RequestError, match="empty"):
            llm.beam_search([""], BeamSearchParams(2, 2))
        assert len(llm.beam_search(["a", "b"], BeamSearchParams(1, 2))) == 2
        assert llm.beam_search([], BeamSearchParams(1, 2)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be a whole number from 1 to 16384, got 0"),
        ({"beam_width": 16_385}, "from 1 to 16384, got 16385"),
        ({"beam_width": 1.5}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2, got 3"),
        ({"length_penalty": "long"}, "length_penalty must be a number, got 'long'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be None or a non-empty list"),
        ({"structured_outputs": "json"}, "structured_outputs must be None, a StructuredOutputs"),
    ],
)
def test_parameters_out_of_range_name_the_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | options))


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_scores_are_made_of_log_probabilities_of_all_tokens_or_refused(mode: str) -> None:
    masks = {"return_sampling_mask": mode == "processed_logprobs"}
    plain = BeamSearchParams(2, 3)
    with LLM(multiprocess=False, logprobs_mode=mode, **masks, **OPTIONS) as llm:
        for further in ({"temperature": 0.5}, {"allowed_token_ids": [5, 6, 7]}):
            with pytest.raises(RequestError, match="beam_search sums log-probabilities"):
                llm.beam_search(["import os"], BeamSearchParams(2, 3, **further))
        if mode == "raw_logits":
            with pytest.raises(RequestError, match="beam_search sums log-probabilities"):
                llm.beam_search(["import os"], plain)
            return
        (found,) = llm.beam_search(["import os"], plain)
    with LLM(multiprocess=False, **OPTIONS) as llm:
        (wanted,) = llm.beam_search(["import os"], plain)
    assert [each.tokens for each in found.sequences] == [each.tokens for each in wanted.sequences]
    assert [each.cum_logprob for each in found.sequences] == [
        each.cum_logprob for each in wanted.sequences
    ]
