"""Grammars are compiled, mask logits and follow outputs; the logits are random numbers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tokenizers
import torch

import shmllm
from shmllm.core.constraint import Constraint
from shmllm.core.plan import Constrained
from shmllm.errors import RequestError
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.outputs.columns import FinishReason
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.worker import grammar as grammar_module
from shmllm.worker.background import BackgroundThread
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.grammar_masks import GrammarMasks

TINY = Path(shmllm.__file__).parent / "assets" / "tiny"
EOS = 0
TOKENIZER_SIZE = 4096
VOCAB_SIZE = TOKENIZER_SIZE + 4  # padded, and not a multiple of 32
NUM_SEEDS = 200
MAX_STEPS = 400

TOKENIZER = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}},
            "required": ["street"],
            "additionalProperties": False,
        }
    },
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert {"name", "age"} <= person.keys() <= PERSON["properties"].keys()
    home = person.get("home")
    return (
        isinstance(person["name"], str)
        and len(person["name"]) <= 6
        and type(person["age"]) is int
        and 0 <= person["age"] <= 130
        and len(person.get("tags", [])) <= 2
        and all(tag in ("a", "b", 3, None) for tag in person.get("tags", []))
        and (home is None or re.fullmatch("[A-Z][a-z]{1,5}", home["street"]) is not None)
    )


def balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        assert depth >= 0
    return depth == 0 and re.fullmatch(r"\(*x\)*", text) is not None


CHOICES = ["yes", "yes!", "no", 'a "quoted" one', "tab\tand\nline", "naïve 😀", "/x/ \\ %json"]
NUMBER = r"-?(0|[1-9]\d{0,3})(\.[0-9]{1,2})?"
ARITHMETIC = r"""
root ::= sum ";"            # one line
sum ::= term (" " [+-] " " term){0,3}
term ::= [0-9]{1,2} | "pi" | 'e'
"""

CASES: dict[str, tuple[StructuredOutputsParams, Callable[[str], Any]]] = {
    "json schema": (
        StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        is_person,
    ),
    "json schema as text": (
        StructuredOutputsParams(
            json=json.dumps({"enum": [1, "two", {"three": [3]}]}), disable_any_whitespace=True
        ),
        lambda text: json.loads(text) in [1, "two", {"three": [3]}],
    ),
    "json with a pattern that only matches a property": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"score": {"type": "integer", "multipleOf": 5}, "a b": {}},
                "patternProperties": {
                    "^score$": {"minimum": 0},
                    "^a.b$": False,
                    "^(a b|score)$": {"maximum": 10},
                },
                "required": ["score"],
                "additionalProperties": False,
            },
            disable_any_whitespace=True,
        ),
        lambda text: json.loads(text) in [{"score": n} for n in (0, 5, 10)],
    ),
    "json object": (
        StructuredOutputsParams(json_object=True, whitespace_pattern=" ?"),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (
        StructuredOutputsParams(regex=NUMBER),
        lambda text: re.fullmatch(NUMBER, text),
    ),
    "regex of any bytes": (
        StructuredOutputsParams(regex=r"[^a-z]{3,9}é"),
        lambda text: re.fullmatch(r"[^a-z]{3,9}é", text),
    ),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "regular grammar": (
        StructuredOutputsParams(grammar=ARITHMETIC),
        lambda text: re.fullmatch(r"(\d{1,2}|pi|e)( [+-] (\d{1,2}|pi|e)){0,3};", text),
    ),
    "recursive grammar": (
        StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
        balanced,
    ),
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TINY, [EOS])


def begin(compiler: GrammarCompiler, **fields: Any) -> Constraint:
    return compiler.compile(grammar_of(StructuredOutputsParams(**fields))).result()()


def ending_bias() -> torch.Tensor:
    """A bias towards the ends of strings and objects, so that random outputs end."""
    bias = torch.zeros(VOCAB_SIZE)
    for text in ('"', '"}', "}", ")"):
        token_id = TOKENIZER.token_to_id(text)
        if token_id is not None:
            bias[token_id] = 3.0
    return bias


def outputs_of_noise(
    compiler: GrammarCompiler, params: StructuredOutputsParams, num: int
) -> list[tuple[list[int], FinishReason]]:
    """Generate one output for each seed, in one batch. Returns their tokens and finish reasons;
    NONE if an output did not end in MAX_STEPS."""
    start = compiler.compile(grammar_of(params)).result()
    masks = GrammarMasks(compiler, num)
    generators = [torch.Generator().manual_seed(seed) for seed in range(num)]
    constraints = [start() for _ in range(num)]
    tokens: list[list[int]] = [[] for _ in range(num)]
    endings = [FinishReason.NONE] * num
    bias = ending_bias()
    for step in range(MAX_STEPS):
        running = [row for row in range(num) if not endings[row]]
        if not running:
            break
        mask = masks.begin(
            [Constrained(i, i, constraints[row]) for i, row in enumerate(running)], {}
        )
        logits = torch.stack([torch.randn(VOCAB_SIZE, generator=generators[r]) for r in running])
        logits += bias * step / 10
        mask(logits)
        for row, token_id in zip(running, logits.argmax(dim=1).tolist(), strict=True):
            tokens[row].append(token_id)
            endings[row] = constraints[row].take(token_id)
            assert endings[row] is not FinishReason.ERROR, constraints[row].error
    return list(zip(tokens, endings, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_output_of_a_random_model_matches_the_grammar(
    case: str, compiler: GrammarCompiler
) -> None:
    params, matches = CASES[case]
    outputs = outputs_of_noise(compiler, params, NUM_SEEDS)
    texts = set()
    for tokens, ending in outputs:
        assert max(tokens) < TOKENIZER_SIZE
        if ending is FinishReason.STOP:
            assert EOS not in tokens[:-1]
            texts.add(TOKENIZER.decode(tokens, skip_special_tokens=True))
    assert all(ending is FinishReason.STOP for _, ending in outputs)
    assert [text for text in texts if not matches(text)] == []
    assert len(texts) >= 3


def test_every_choice_is_possible(compiler: GrammarCompiler) -> None:
    outputs = outputs_of_noise(compiler, StructuredOutputsParams(choice=CHOICES), NUM_SEEDS)
    assert {TOKENIZER.decode(tokens) for tokens, _ in outputs} == set(CHOICES)


def mask_of(compiler: GrammarCompiler, constraint: Constraint) -> set[int]:
    logits = torch.zeros(1, VOCAB_SIZE)
    GrammarMasks(compiler, 4).begin([Constrained(0, 0, constraint)], {})(logits)
    assert set(logits.unique().tolist()) <= {0.0, -torch.inf}
    return set(torch.nonzero(logits[0] == 0).flatten().tolist())


def id_of(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text).ids
    return token_id


def test_a_mask_allows_exactly_the_tokens_that_the_grammar_allows(
    compiler: GrammarCompiler,
) -> None:
    allowed = mask_of(compiler, begin(compiler, regex="[ab]+c"))
    texts = {TOKENIZER.decode([token_id]) for token_id in allowed}
    vocabulary = {TOKENIZER.decode([i]) for i in range(3, TOKENIZER_SIZE)}
    assert texts == {t for t in vocabulary if re.fullmatch("[ab]+c?", t)}


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    constraint = begin(compiler, regex="a+")
    assert EOS not in mask_of(compiler, constraint)
    assert constraint.take(id_of("a")) is FinishReason.NONE
    assert EOS in mask_of(compiler, constraint)
    assert constraint.take(EOS) is FinishReason.STOP


def test_an_empty_expression_allows_only_the_end(compiler: GrammarCompiler) -> None:
    constraint = begin(compiler, regex="")
    assert mask_of(compiler, constraint) == {EOS}
    assert constraint.take(EOS) is FinishReason.STOP


def test_an_output_ends_when_no_token_may_follow(compiler: GrammarCompiler) -> None:
    constraint = begin(compiler, choice=["a", "b"])
    assert constraint.take(id_of("a")) is FinishReason.STOP


def test_each_of_several_end_tokens_ends_the_output() -> None:
    several = GrammarCompiler(TINY, [1, 2])
    assert mask_of(several, begin(several, regex="(a)?")) == {id_of("a"), 1, 2}
    assert begin(several, regex="a?").take(2) is FinishReason.STOP


def test_a_model_without_end_tokens_ends_when_no_token_may_follow() -> None:
    none = GrammarCompiler(TINY, [])
    assert begin(none, choice=["a"]).take(id_of("a")) is FinishReason.STOP


def test_a_token_that_does_not_fit_is_an_error_that_says_so(compiler: GrammarCompiler) -> None:
    constraint = begin(compiler, choice=["a"])
    assert constraint.take(id_of("b")) is FinishReason.ERROR
    assert "allowed_token_ids" in constraint.error
    assert "leave no token" in constraint.error
    assert constraint.take(id_of("a")) is FinishReason.ERROR


def test_a_grammar_that_is_too_ambiguous_ends_with_an_error(compiler: GrammarCompiler) -> None:
    constraint = begin(compiler, grammar='root ::= root root | "a"')
    finish, num_tokens = FinishReason.NONE, 0
    while not finish:
        allowed = mask_of(compiler, constraint)
        token_id = max(allowed, key=lambda i: len(TOKENIZER.decode([i])))
        finish = constraint.take(token_id)
        num_tokens += 1
        assert num_tokens < 200
    assert finish is FinishReason.ERROR
    assert "Too many items" in constraint.error


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ["<|im_end|>"]},
        {"regex": r"<\|im_end\|>"},
        {"json": {"const": "<|im_end|>"}, "disable_any_whitespace": True},
    ],
)
def test_text_that_looks_like_a_special_token_is_text(
    fields: dict[str, Any], compiler: GrammarCompiler
) -> None:
    outputs = outputs_of_noise(compiler, StructuredOutputsParams(**fields), 5)
    assert all(min(tokens) > 2 for tokens, _ in outputs)
    texts = {
        TOKENIZER.decode(tokens, skip_special_tokens=False).strip('"') for tokens, _ in outputs
    }
    assert texts == {"<|im_end|>"}


@pytest.mark.parametrize(
    "grammar", ["start: /b+/ /b+/", 'start: "c" | /b+/ /b+/', "start: r\nr: /b+/ r"]
)
def test_an_endless_grammar_advances_token_by_token(
    grammar: str, compiler: GrammarCompiler
) -> None:
    """llguidance computes forced tokens in advance; in these grammars they never end."""
    constraint = begin(compiler, grammar=grammar)
    for _ in range(5):
        assert id_of("b") in mask_of(compiler, constraint)
        assert constraint.take(id_of("b")) is FinishReason.NONE


def test_rows_without_a_constraint_keep_their_logits(compiler: GrammarCompiler) -> None:
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    masks = GrammarMasks(compiler, 8)
    first, second = begin(compiler, regex="a"), begin(compiler, regex="b")
    masks.begin([Constrained(1, 1, first), Constrained(3, 3, second)], {})(logits)
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
    for row, text in ((1, "a"), (3, "b")):
        kept = torch.isfinite(logits[row])
        assert kept.nonzero().flatten().tolist() == [id_of(text)]
        assert torch.equal(logits[row][kept], before[row][kept])


def test_without_constraints_there_is_no_mask(compiler: GrammarCompiler) -> None:
    assert GrammarMasks(compiler, 8).begin([], {}) is None


def test_requests_with_the_same_grammar_have_separate_states(compiler: GrammarCompiler) -> None:
    start = compiler.compile(grammar_of(StructuredOutputsParams(regex="[ax][by]"))).result()
    first, second = start(), start()
    first.take(id_of("a"))
    assert mask_of(compiler, first) == {id_of("b"), id_of("y")}
    assert {id_of("a"), id_of("x")} <= mask_of(compiler, second)


def test_a_grammar_is_compiled_once_for_many_requests() -> None:
    fresh = GrammarCompiler(TINY, [EOS])
    futures = [fresh.compile("start: /a+/") for _ in range(50)]
    assert all(future is futures[0] for future in futures)
    futures[0].result()
    assert fresh.num_compiled == 1


def test_the_least_recently_used_grammar_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 2)
    fresh = GrammarCompiler(TINY, [EOS])
    for text in ("start: /a/", "start: /b/", "start: /a/", "start: /c/", "start: /a/"):
        fresh.compile(text).result()
    assert fresh.num_compiled == 3
    fresh.compile("start: /b/").result()
    assert fresh.num_compiled == 4


@pytest.mark.parametrize("text", ["start: /(/", "start: <|no_such_token|>", "nonsense", ""])
def test_a_grammar_that_cannot_be_compiled_is_a_request_error(
    text: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError, match="cannot be compiled"):
        compiler.compile(text).result()


def test_a_directory_without_a_tokenizer_file_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot use the tokenizer of .*: no tokenizer in"):
        GrammarCompiler(tmp_path, [EOS]).compile("start: /a/").result()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="cannot use"):
        GrammarCompiler(tmp_path, [EOS]).compile("start: /a/").result()


def test_a_tokenizer_at_which_the_library_panics_is_a_request_error(tmp_path: Path) -> None:
    content = json.loads((TINY / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {"</s>": 0, "<0xZZ>": 1}, "merges": []}
    content |= {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match="cannot use the tokenizer of"):
        GrammarCompiler(tmp_path, [EOS]).compile("start: /a/").result()


def test_a_decoder_of_spaces_alone_is_read(tmp_path: Path) -> None:
    """That of sentencepiece's unigrams writes <0x41> out, which is no byte there."""
    pieces = ["</s>", "<unk>", "\u2581", "\u2581a", "b", "<0x41>", "A", "\u2581<0x"]
    unigrams = tokenizers.models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1)
    tokenizer = tokenizers.Tokenizer(unigrams)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(pieces[:2])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, [EOS])
    constraint = begin(compiler, regex="b ?a?A")
    allowed = []
    for token in map(pieces.index, ("b", "\u2581a", "A")):
        logits = torch.zeros(1, len(pieces))
        GrammarMasks(compiler, 1).begin([Constrained(0, 0, constraint)], {})(logits)
        allowed.append([pieces[each] for each in np.flatnonzero(logits[0].numpy() == 0)])
        constraint.take(token)
    assert allowed == [["b"], ["\u2581", "\u2581a", "A"], ["A"]]


def test_compile_returns_before_the_grammar_is_compiled() -> None:
    fresh = GrammarCompiler(TINY, [EOS])
    release = threading.Event()
    fresh._thread.submit(release.wait)
    future = fresh.compile("start: /a/")
    assert not future.done()
    release.set()
    assert future.result()


def test_a_failed_job_does_not_end_the_thread() -> None:
    background = BackgroundThread("test-background")

    def fail() -> None:
        raise KeyboardInterrupt

    failed: Future[None] = background.submit(fail)
    assert background.submit(threading.get_ident).result() != threading.get_ident()
    assert isinstance(failed.exception(), KeyboardInterrupt)


def test_a_thread_ends_when_nothing_refers_to_it() -> None:
    background = BackgroundThread("test-background")
    thread = background.submit(threading.current_thread).result()
    del background
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("size", ["smaller", "larger"])
def test_the_models_vocabulary_may_differ_from_the_tokenizers(
    size: Literal["smaller", "larger"], compiler: GrammarCompiler
) -> None:
    vocab_size = TOKENIZER_SIZE - 90 if size == "smaller" else TOKENIZER_SIZE + 90
    logits = torch.zeros(1, vocab_size)
    constraint = begin(compiler, regex=r"(?s:.)*")
    GrammarMasks(compiler, 1).begin([Constrained(0, 0, constraint)], {})(logits)
    allowed = np.flatnonzero(logits[0].numpy() == 0)
    assert allowed.max() == min(vocab_size, TOKENIZER_SIZE) - 1
    assert len(allowed) > 3000
