"""Grammars allow the same tokens whatever files the tokenizer is in."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from support.ranked_tokenizers import CONTROLS, KIMI, NUM_SPECIAL, RANKED, write_kimi, write_tekken
from support.tokenizer_helpers import vocab_size_of

from shmllm.core.constraint import Constraint
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.columns import FinishReason
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.worker.grammar import GrammarCompiler

NUM_WALKS = 5
MAX_STEPS = 400
SCHEMA = {
    "type": "object",
    "properties": {
        "thing": {"type": "string", "maxLength": 8},
        "number": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["thing", "number"],
    "additionalProperties": False,
}
CHOICES = ["the thing", "then", "é的"]
PATTERN = r"(the |[^a-z]é){2,4}\d"
MARKS = {"tekken.json": "[TOOL_CALLS]", "tiktoken.model": "<|tool_call_begin|>"}


def tag_of(mark: str) -> dict[str, Any]:
    tag = {"type": "tag", "begin": mark, "content": {"type": "any_text", "max_chars": 5}}
    return {"type": "structural_tag", "format": tag | {"end": "the"}}


def is_schemas(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == {"thing", "number"}
        and isinstance(found["thing"], str)
        and len(found["thing"]) <= 8
        and type(found["number"]) is int
        and 0 <= found["number"] <= 20
    )


CONSTRAINTS: dict[str, tuple[Callable[[str], StructuredOutputsParams], Callable[[str], Any]]] = {
    "json": (lambda _: StructuredOutputsParams(json=SCHEMA), is_schemas),
    "regex": (
        lambda _: StructuredOutputsParams(regex=PATTERN),
        lambda text: re.fullmatch(PATTERN, text),
    ),
    "choice": (lambda _: StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "grammar": (
        lambda _: StructuredOutputsParams(grammar='root ::= "(" root ")" | "th"'),
        lambda text: text.strip("()") == "th" and text.count("(") == text.count(")"),
    ),
    "structural tag": (
        lambda mark: StructuredOutputsParams(structural_tag=tag_of(mark)),
        lambda text: re.fullmatch(r".{0,5}the", text, re.DOTALL),
    ),
}


def tekken_tokens() -> tuple[dict[bytes, int], dict[str, int]]:
    """The plain and the special tokens of the tekken.json."""
    plain = {token: NUM_SPECIAL + rank for rank, token in enumerate(RANKED)}
    named = dict(enumerate(CONTROLS))
    return plain, {named.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(NUM_SPECIAL)}


def kimi_tokens() -> tuple[dict[bytes, int], dict[str, int]]:
    """The plain and the special tokens of the tiktoken.model."""
    first = len(RANKED)
    special = {f"<|reserved_token_{first + each}|>": first + each for each in range(256)}
    plain = {token: rank for rank, token in enumerate(RANKED)}
    decoder: Mapping[str, Any] = KIMI["added_tokens_decoder"]  # type: ignore[assignment]
    for number, token in decoder.items():
        del special[f"<|reserved_token_{number}|>"]
        if token["special"]:
            special[token["content"]] = int(number)
        else:
            plain[token["content"].encode()] = int(number)
    return plain, special


FILES = {
    "tekken.json": (write_tekken, tekken_tokens, CONTROLS.index("</s>")),
    "tiktoken.model": (write_kimi, kimi_tokens, len(RANKED) + 1),
}


def allowed(constraint: Constraint) -> list[int]:
    """The tokens that may follow."""
    mask = np.frombuffer(constraint.matcher.compute_bitmask(), np.uint8)  # type: ignore[attr-defined]
    return [int(each) for each in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


def walk(constraints: list[Constraint], seed: int) -> tuple[list[int], bool]:
    """Take random tokens that all constraints allow alike. Returns them, and whether they end."""
    draw = random.Random(seed)
    taken: list[int] = []
    for _ in range(MAX_STEPS):
        first, *others = map(allowed, constraints)
        assert all(other == first for other in others)
        token = draw.choice(first)
        taken.append(token)
        reasons = {constraint.take(token) for constraint in constraints}
        assert len(reasons) == 1
        if reasons == {FinishReason.STOP}:
            return taken, True
    return taken, False


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("file", FILES)
def test_tokens_of_ranked_bytes_are_masked_by_their_bytes(
    file: str, kind: str, tmp_path: Path
) -> None:
    write, tokens_of, end = FILES[file]
    make, is_valid = CONSTRAINTS[kind]
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    text = grammar_of(make(MARKS[file]), tokenizer.added_tokens, tokenizer.plain_added_ids)
    ours, theirs = GrammarCompiler(tmp_path, [end]), GrammarCompiler(tmp_path, [end])
    plain, special = tokens_of()
    theirs._tokenizer = LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
        encoder=plain, special_tokens=special, pattern=r"\p{L}+|\P{L}", eos_token=[end]
    )
    assert theirs._tokenizer.vocab_size == vocab_size_of(tokenizer)
    num_ended = 0
    for seed in range(NUM_WALKS):
        both = [each.compile(text).result()() for each in (ours, theirs)]
        taken, is_over = walk(both, seed)
        num_ended += is_over
        if is_over:
            assert is_valid(tokenizer.decode(taken).removeprefix(MARKS[file]))
    assert num_ended
    assert ours.vocab_size == vocab_size_of(tokenizer)
