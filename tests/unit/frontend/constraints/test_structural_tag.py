"""Structural tags accept the texts that xgrammar accepts, and errors name the place.

The accepted texts were computed with xgrammar 0.2.8 from the same structural tags.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shmllm import RequestError, StructuredOutputsParams
from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer, grammar_of

ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


A = tag("<f=a>", INTEGER, "</f>")
B = tag("<f=b>", const("x"), ["</f>", "</g>"])


def triggered(**options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B], **options}


def separated(**options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [A, B], "separator": ",", **options}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


ONE, TWO = "<f=a>1</f>", "<f=a>1</f>,<f=b>x</f>"
TAGS = ["", "hi", ONE, f"hi{ONE}", f"{ONE}bye", "hi<f=b>x</g>bye<f=a>2</f>!"]
TAGS += [f"{ONE}<f=b>x</f>", TWO, "<f=c>", "hi<f=a>z</f>", "a<f", f"{ONE},"]
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
AB = const("ab")
NESTED = {"type": "grammar", "grammar": 'root ::= "x" | "(" root ")"'}

# name: (format, texts, those of them that match)
MATCHES: dict[str, tuple[Any, list[str], list[str]]] = {
    "triggered": (triggered(), TAGS, [t for t in TAGS if "<f=c" not in t and "z" not in t]),
    "triggered, one": (
        triggered(stop_after_first=True),
        TAGS,
        ["", "hi", ONE, f"hi{ONE}", "a<f"],
    ),
    "triggered, at least one": (
        triggered(at_least_one=True),
        TAGS,
        [ONE, f"{ONE}bye", f"{ONE}<f=b>x</f>", TWO, f"{ONE},"],
    ),
    "triggered, exactly one": (
        triggered(at_least_one=True, stop_after_first=True),
        TAGS,
        [ONE],
    ),
    "triggered, without a word": (
        triggered(excludes=["no"]),
        ["hi", "no", f"hi{ONE}no", f"n{ONE}o"],
        ["hi", f"n{ONE}o"],
    ),
    "triggered in a tag": (
        tag("<a>", triggered(), "</a>"),
        ["<a>hi</a>", f"<a>x{ONE}y</a>", "<a>x<f=a>q</f>y</a>", "<a>x", f"<a>{ONE}</a>"],
        ["<a>hi</a>", f"<a>x{ONE}y</a>", f"<a>{ONE}</a>"],
    ),
    "separated": (separated(), TAGS, ["", ONE, TWO]),
    "separated, one": (separated(stop_after_first=True), TAGS, ["", ONE]),
    "separated, at least one": (separated(at_least_one=True), TAGS, [ONE, TWO]),
    "sequence": (
        sequence(tag("<t>", ANY, "</t>"), {"type": "optional", "content": const(" ")}, A),
        [f"<t>a<b</t> {ONE}", f"<t></t>{ONE}", "<t></t>", ONE],
        [f"<t>a<b</t> {ONE}", f"<t></t>{ONE}"],
    ),
    "text before a mark": (
        sequence(ANY, const("|"), ANY, A),
        [f"a|b{ONE}", f"|{ONE}", f"a{ONE}", "a|b"],
        [f"a|b{ONE}", f"|{ONE}"],
    ),
    "without words": (
        {"type": "any_text", "excludes": ["bad", "worse"]},
        ["", "ba", "bad", "xbadx", "babbad", "worsen"],
        ["", "ba"],
    ),
    "at most three": (
        tag("[", {"type": "any_text", "max_chars": 3}, "]"),
        ["[abc]", "[]", "[abcd]"],
        ["[abc]", "[]"],
    ),
    "or": (
        {"type": "or", "elements": [NUMBER, const("no"), INTEGER]},
        ["12", "no", "-3", "x", ""],
        ["12", "no", "-3"],
    ),
    "repeat": (
        {"type": "repeat", "min": 2, "max": 3, "content": AB},
        ["ab", "abab", "ababab", "abababab"],
        ["abab", "ababab"],
    ),
    "repeat without bound": (
        {"type": "repeat", "min": 2, "max": -1, "content": AB},
        ["ab", "abab", "abababab"],
        ["abab", "abababab"],
    ),
    "repeat never": (
        {
            "type": "sequence",
            "elements": [INTEGER, {"type": "repeat", "min": 0, "max": 0, "content": AB}],
        },
        ["1", "1ab", ""],
        ["1"],
    ),
    "plus": ({"type": "plus", "content": AB}, ["", "ab", "abab"], ["ab", "abab"]),
    "star": ({"type": "star", "content": AB}, ["", "ab", "aba"], ["", "ab"]),
    "grammar": (tag("[", NESTED, "]"), ["[x]", "[((x))]", "[(x]", "x"], ["[x]", "[((x))]"]),
}


def accepts(grammar: str, tokens: list[int], tokenizer: Any = None) -> bool:
    matcher = LLMatcher(tokenizer or _byte_tokenizer(), grammar, log_level=0)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_for(form: Any, tokens: dict[str, int] | None = None, free: Any = ()) -> str:
    given = {"type": "structural_tag", "format": form}
    return grammar_of(StructuredOutputsParams(structural_tag=given), tokens or {}, free)


@pytest.mark.parametrize("name", MATCHES)
def test_the_texts_of_a_format_match(name: str) -> None:
    form, texts, matching = MATCHES[name]
    grammar = grammar_for(form)
    assert [t for t in texts if accepts(grammar, list(t.encode()))] == matching


def without_types(form: Any) -> Any:
    """The format without any type but that of JSON schemas' own contents."""
    if isinstance(form, list):
        return [without_types(each) for each in form]
    if not isinstance(form, dict):
        return form
    kept = {name: value for name, value in form.items() if name != "type"}
    return {
        name: value if name == "json_schema" else without_types(value)
        for name, value in kept.items()
    }


@pytest.mark.parametrize(
    "form",
    [triggered(), separated(), sequence(A, const("b")), {"type": "any_text", "excludes": ["a"]}],
)
def test_formats_that_can_be_told_apart_need_no_type(form: Any) -> None:
    """xgrammar 0.2.8 reads these without types, and refuses the ones below."""
    assert grammar_for(without_types(form)) == grammar_for(form)


@pytest.mark.parametrize("form", [{}, {"pattern": "a"}, {"grammar": 'root ::= "a"'}])
def test_other_formats_need_their_type(form: Any) -> None:
    with pytest.raises(RequestError, match="unknown type None"):
        grammar_for(form)


def test_the_older_form_and_json_text_mean_the_same() -> None:
    older = {
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    found = grammar_of(StructuredOutputsParams(structural_tag=older))
    assert found == grammar_of(StructuredOutputsParams(structural_tag=json.dumps(older)))
    assert found == grammar_for(triggered(tags=[A]))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, LLTokenizer]:
    """Single bytes, "<call>", which is added but no special token, and "[END]", which is one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, normalized=False) for text in ("<call>", "<think>")]
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens(["[END]", "<eos>"])
    path: Path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, LLTokenizer(str(path), eos_token=[tokenizer.token_to_id("<eos>")])


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of the single characters."""
    return [token for character in text for token in tokenizer.encode(character).ids]


def test_a_mark_is_its_token_and_free_text_ends_at_either_form(vocabulary: Any) -> None:
    tokenizer, library = vocabulary
    tokens = {t: tokenizer.token_to_id(t) for t in ("<call>", "<think>", "[END]")}
    free = [tokens["<call>"], tokens["<think>"]]
    call = tag("<call>x", INTEGER, "[END]")
    form = {"type": "triggered_tags", "triggers": ["<call"], "tags": [call]}
    grammar = grammar_for(form, tokens, free)

    def matches(*parts: list[int]) -> bool:
        return accepts(grammar, [token for part in parts for token in part], library)

    def whole(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text).ids
        return found

    spelled_call = spelled(tokenizer, "<call>")
    assert tokens["<call>"] not in spelled_call
    assert matches(whole("a<think>b<call>x1[END]c"))
    assert matches(whole("a"), spelled_call, whole("x1[END]"))
    assert not matches(whole("a<call>y"))
    assert not matches(whole("a"), spelled_call, whole("y"))
    assert not matches(whole("a<call>x1"), spelled(tokenizer, "[END]"))
    assert not matches(whole("a[END]"))
    ended = grammar_for(sequence(ANY, const("<call>"), INTEGER), tokens, free)
    assert accepts(ended, whole("a<think>b<call>12"), library)
    assert accepts(ended, [*whole("ab"), *spelled_call, *whole("12")], library)
    assert not accepts(ended, whole("ab12"), library)


def test_a_mark_may_be_a_token_by_its_id(vocabulary: Any) -> None:
    tokenizer, library = vocabulary
    tokens = {"[END]": tokenizer.token_to_id("[END]")}
    for token in ("[END]", tokens["[END]"]):
        named = {"type": "token", "token": token}
        grammar = grammar_for(sequence(named, tag(named, INTEGER, named)), tokens)
        assert accepts(grammar, tokenizer.encode("[END][END]5[END]").ids, library)


def test_free_text_at_the_end_may_have_few_tokens(vocabulary: Any) -> None:
    tokenizer, library = vocabulary
    grammar = grammar_for({"type": "any_text", "max_tokens": 2})
    matcher = LLMatcher(library, grammar, log_level=0)
    assert matcher.try_consume_tokens(tokenizer.encode("abc").ids) == 2


DEEP: Any = ANY
for _ in range(60):
    DEEP = {"type": "optional", "content": DEEP}

# (structural tag, or a format; the error)
REFUSED: list[tuple[Any, str]] = [
    ("{", " is not JSON: "),
    ({"a": 1}, ' has neither "structures" and "triggers" nor'),
    ({"structures": [{}], "triggers": ["a"]}, ": structures[0] must have begin, schema and end"),
    ({"structures": [], "triggers": ["a"]}, ": tags must not be empty"),
    ({"type": "x"}, ": format has the unknown type 'x'; the nearest is"),
    ("text", ": format must be a dict with a type, got 'text'"),
    ({"type": "dispatch"}, ": format has the type 'dispatch', which cannot be expressed"),
    (tag("a", 3, "b"), ": format.content must be a dict with a type, got 3"),
    ({"type": "any_text", "exclude": []}, ": format has the unknown field 'exclude'"),
    ({"type": "any_text", "excludes": [""]}, ": format.excludes must be a list of non-empty"),
    ({"type": "any_text", "max_chars": -1}, ": format.max_chars must be a whole number from 0"),
    (tag("a", {"type": "any_text", "max_tokens": 3}, "b"), ": format.content.max_tokens is "),
    ({"type": "json_schema"}, ": format has no 'json_schema'"),
    ({**INTEGER, "style": "qwen_xml"}, ": format.style can only be 'json', got 'qwen_xml'"),
    (
        {"type": "json_schema", "json_schema": {"properties": {"x": {"not": {}}}}},
        ": format.json_schema has the keyword 'not' at properties.x",
    ),
    (sequence(A, {"type": "regex", "pattern": "("}), ": format.elements[1].pattern "),
    ({"type": "grammar", "grammar": "root"}, ": format.grammar line 1: expected a rule"),
    (sequence(), ": format.elements must not be empty"),
    (sequence(ANY, NUMBER), ": format.elements[0] is free text before a regex"),
    (sequence({"type": "star", "content": ANY}, A), ": format.elements[0] repeats free text"),
    ({"type": "repeat", "min": 2, "max": 1, "content": AB}, ": format.max must be -1, or from 2"),
    ({"type": "repeat", "min": -1, "max": 1, "content": AB}, ": format needs min and max up to"),
    (triggered(triggers=[]), ": format.triggers must be a list of non-empty strings"),
    (triggered(triggers=["<x"]), ": format.tags[0].begin begins with 0 of the triggers"),
    (triggered(triggers=["<", "<f"]), ": format.tags[0].begin begins with 2 of the triggers"),
    (triggered(tags=[AB]), ": format.tags[0] must be a tag"),
    (triggered(at_least_one=1), ": format.at_least_one must be true or false, got 1"),
    (separated(separator=None), ": format.separator must be a str, got None"),
    (tag(None, AB, "x"), ": format.begin must be a str, got None"),
    (tag({"type": "token", "token": 7}, AB, "x"), ": format.begin.token is no added token"),
    (DEEP, " is nested more than 50 deep"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_errors_name_the_place(given: Any, message: str) -> None:
    is_whole = given == "{" or (isinstance(given, dict) and "type" not in given)
    value = given if is_whole else {"type": "structural_tag", "format": given}
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredOutputsParams(structural_tag=value))
    assert f"structured_outputs.structural_tag{message}" in str(caught.value) or (
        message.startswith(" is nested") and message in str(caught.value)
    )
    assert "\n" not in str(caught.value)
