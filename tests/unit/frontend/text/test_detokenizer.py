"""IncrementalDetokenizer compared with decoding all tokens at once; OutputText."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tokenizer_helpers import token_id_of, vocab_size_of
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from shmllm.frontend.text.detokenizer import IncrementalDetokenizer, OutputText
from shmllm.frontend.text.tokenizer import Tokenizer as FrontEndTokenizer
from shmllm.frontend.text.tokenizer_backend import FastBackend

KINDS = ["byte_level", "metaspace", "byte_fallback", "word_piece"]
BAD = "\ufffd"
FEW = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reference(tokenizer, prompt, ids, skip=True):
    """The text that the ids add to the prompt's text if both are decoded at once."""
    known = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(list(prompt) + list(ids), skip_special_tokens=skip)
    size = 0
    while size < min(len(known), len(text)) and known[size] == text[size]:
        size += 1
    return text[size:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_text", ["", "Hello there", "the fox <|user|>", "😀"])
def test_the_text_after_each_token_is_a_prefix_of_the_exact_text(
    kind, prompt_text, tokenizer_of, samples
):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(prompt_text)
    for sample in [*samples, "Wow 😀 the fox 中 it"]:
        ids = tokenizer.encode(sample)
        full = reference(tokenizer, prompt, ids)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        for count, token_id in enumerate(ids, 1):
            detokenizer.append([token_id])
            so_far = reference(tokenizer, prompt, ids[:count])
            assert full.startswith(detokenizer.text)
            assert BAD not in detokenizer.text
            if BAD not in so_far:
                assert detokenizer.text == so_far
        detokenizer.finish()
        assert detokenizer.text == full


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
@given(data=st.data(), skip=st.booleans())
@FEW
def test_incremental_decoding_of_any_ids_equals_decoding_at_once(kind, data, skip, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    token_ids = st.integers(0, vocab_size_of(tokenizer) + 20)
    prompt = data.draw(st.lists(token_ids, max_size=20))
    chunks = data.draw(st.lists(st.lists(token_ids, max_size=4), max_size=12))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    deltas = [detokenizer.append(chunk) for chunk in chunks]
    deltas.append(detokenizer.finish())
    ids = [token_id for chunk in chunks for token_id in chunk]
    assert "".join(deltas) == detokenizer.text == reference(tokenizer, prompt, ids, skip)


@given(data=st.data())
@FEW
def test_byte_fallback_decodes_any_ids(data, tokenizer_of):
    tokenizer = tokenizer_of("byte_fallback")
    token_ids = st.integers(0, vocab_size_of(tokenizer) + 20)
    prompt = data.draw(st.lists(token_ids, max_size=20))
    ids = data.draw(st.lists(token_ids, max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    text = "".join(detokenizer.append([token_id]) for token_id in ids) + detokenizer.finish()
    expected = reference(tokenizer, prompt, ids)
    if BAD not in tokenizer.decode(prompt + ids):
        assert text == expected
    assert text == detokenizer.text


def test_a_byte_run_that_becomes_invalid_keeps_returned_text(tokenizer_of):
    tokenizer = tokenizer_of("byte_fallback")
    ids = [token_id_of(tokenizer, f"<0x{byte:02X}>") for byte in [*"中".encode(), 0xE4]]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the"))
    assert [detokenizer.append([token_id]) for token_id in ids] == ["", "", "中", ""]
    fox = tokenizer.encode("fox")
    assert "".join(detokenizer.append([token_id]) for token_id in fox) == BAD + " fox"


def test_a_character_that_began_in_the_prompt_is_context_for_later_tokens(tokenizer_of):
    tokenizer = tokenizer_of("byte_fallback")
    first, second, third = (token_id_of(tokenizer, f"<0x{byte:02X}>") for byte in (0xC2, 0x80, 0))
    detokenizer = IncrementalDetokenizer(tokenizer, [first])
    assert [detokenizer.append([token_id]) for token_id in (second, third)] == ["\x80", "\x00"]


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback"])
def test_the_leading_space_of_the_first_token_is_kept(kind, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the lazy"))
    detokenizer.append(tokenizer.encode("fox"))
    assert detokenizer.text == " fox"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_prompt_may_end_inside_a_character(kind, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    byte_ids = [byte_token(tokenizer, kind, byte) for byte in "😀".encode()]
    prompt = tokenizer.encode("the") + byte_ids[:2]
    completed = IncrementalDetokenizer(tokenizer, prompt)
    assert [completed.append([token_id]) for token_id in byte_ids[2:]] == ["", "😀"]
    dropped = IncrementalDetokenizer(tokenizer, prompt)
    x = byte_token(tokenizer, kind, ord("x"))
    assert dropped.append([x]) + dropped.append([x]) + dropped.finish() == "xx"


def byte_token(tokenizer, kind, byte):
    if kind == "byte_fallback":
        if byte < 128:
            return token_id_of(tokenizer, chr(byte))
        return token_id_of(tokenizer, f"<0x{byte:02X}>")
    table = tokenizer.byte_table(skip_special_tokens=False)
    return next(i for i in range(vocab_size_of(tokenizer)) if table[i] == bytes([byte]))


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_add_nothing(kind, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    fox = tokenizer.encode("the fox")
    unknown = vocab_size_of(tokenizer) + 7
    detokenizer = IncrementalDetokenizer(tokenizer, fox)
    for _ in range(50):
        assert detokenizer.append([unknown, unknown]) == ""
    detokenizer.append(fox)
    assert detokenizer.finish() == ""
    assert detokenizer.text == reference(tokenizer, fox, fox)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(kind, skip, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the fox") + [token_id_of(tokenizer, "<|end|>")] * 20
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:1], skip_special_tokens=skip)
    detokenizer.append(ids[1:])
    assert ("<|end|>" in detokenizer.text) is not skip
    assert detokenizer.text == reference(tokenizer, ids[:1], ids[1:], skip)


def test_the_window_stays_small(tokenizer_of):
    tokenizer = tokenizer_of("byte_fallback")
    sizes = []
    decode = tokenizer.decode
    bad = token_id_of(tokenizer, "<0xE4>")
    special = token_id_of(tokenizer, "<s>")
    try:
        tokenizer.decode = lambda ids, **kwargs: sizes.append(len(ids)) or decode(ids, **kwargs)
        detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the fox"))
        for token_id in [bad] * 100 + [special] * 100:
            detokenizer.append([token_id])
    finally:
        del tokenizer.decode
    assert max(sizes) <= 20
    assert detokenizer.text.count(BAD) == 100


@pytest.mark.parametrize("num", [1, 7, 8, 9, 40, 1000])
def test_spaces_that_the_decoder_leaves_out_at_the_end_are_kept(num, tokenizer_of):
    """As tokenizers do whose texts are stripped, such as that of GPT-NeoX Japanese."""
    tokenizer = tokenizer_of("byte_fallback")
    fox, space = tokenizer.encode("fox"), token_id_of(tokenizer, "\u2581")
    sizes = []
    decode = tokenizer.decode
    try:
        tokenizer.decode = lambda ids, **_: sizes.append(len(ids)) or decode(ids).rstrip()
        detokenizer = IncrementalDetokenizer(tokenizer, fox)
        for token_id in [*fox, *[space] * num, *fox, space]:
            detokenizer.append([token_id])
        detokenizer.finish()
    finally:
        del tokenizer.decode
    assert detokenizer.text == " fox" + " " * num + " fox"
    assert sum(sizes) < 200 + 10 * num


def output_text(tokenizer, **kwargs):
    return OutputText(IncrementalDetokenizer(tokenizer, []), **kwargs)


def test_output_text_emits_text_up_to_the_stop_string(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    output = output_text(tokenizer, stop=["lazy"])
    emitted = ""
    for token_id in tokenizer.encode("the fox is laz, then lazy and more"):
        match = output.append([token_id])
        emitted += output.take_delta()
        if match:
            break
    assert match.stop == "lazy"
    assert emitted == output.text == "the fox is laz, then "
    assert output.append(tokenizer.encode("more")) is match
    assert output.finish() is match
    assert output.take_delta() == ""
    assert output.text == emitted


def test_output_text_emits_the_held_text_at_the_end(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("the fox 中")
    output = output_text(tokenizer, stop=["fox 中!"])
    output.append(ids[:-1])
    assert output.take_delta() == "the "
    output.finish()
    assert output.take_delta() == output.text[len("the ") :]
    assert output.text == tokenizer.decode(ids[:-1])


def test_output_text_ignores_stop_strings_before_min_tokens(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("the fox the fox")
    output = output_text(tokenizer, stop=["fox"], include_stop=True)
    half = len(tokenizer.encode("the fox"))
    assert output.append(ids[:half], check_stop=False) is None
    assert output.append(ids[half:]).stop == "fox"
    assert output.text == output.take_delta() == "the fox the fox"


class CountingTokenizer:
    """A wrapper of a tokenizer that counts the decoded ids."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.num_decoded = 0

    def decode(self, ids, **options):
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **options)

    def byte_table(self, **options):
        table = self._tokenizer.byte_table(**options)
        return None if table is None else CountingTable(table, self)


class CountingTable:
    def __init__(self, table, counter):
        self._table, self._counter = table, counter

    def __getitem__(self, token_id):
        self._counter.num_decoded += 1
        return self._table[token_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_after_64_thousand_tokens_as_after_one_thousand(
    kind, tokenizer_of, samples
):
    """The cost is the number of decoded ids for 500 tokens, not a time."""
    counter = CountingTokenizer(tokenizer_of(kind))
    ids = tokenizer_of(kind).encode(" ".join(samples))
    detokenizer = IncrementalDetokenizer(counter, ids[:10])
    work = []
    for index in range(64_500):
        if index in (1_000, 1_500, 64_000):
            work.append(counter.num_decoded)
        detokenizer.append([ids[index % len(ids)]])
    at_1k, at_64k = work[1] - work[0], counter.num_decoded - work[2]
    assert at_64k == pytest.approx(at_1k, rel=0.05)
    assert at_64k <= 500 * 30


SPACED = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
SPACED.decoder = decoders.WordPiece()
SPACED.add_special_tokens(["<s>", "</s>"])
SPACED.add_tokens([AddedToken("<x>", normalized=False)])


@pytest.mark.parametrize("skip", [False, True])
@given(ids=st.lists(st.integers(0, 4), max_size=12))
def test_added_tokens_may_follow_each_other_without_a_space(skip, ids):
    """By default the text is that of transformers; what differs is the space between two added
    tokens, as in vLLM's detokenizer."""
    tokenizer = FrontEndTokenizer(FastBackend(SPACED))

    def text(**options):
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip, **options)
        return "".join(detokenizer.append([i]) for i in ids) + detokenizer.finish()

    whole = PreTrainedTokenizerFast(tokenizer_object=SPACED).decode(ids, skip_special_tokens=skip)
    assert text() == whole
    close = whole if skip else re.sub(r"(?<=>) (?=<)", "", whole)
    assert text(spaces_between_special_tokens=False) == close
