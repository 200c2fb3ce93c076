"""The translation of EBNF to Lark text. tests/unit/worker tests what the grammars match."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.errors import RequestError
from shmllm.frontend.constraints.ebnf import MAX_DEPTH, MAX_RULES, to_lark


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('root ::= "a" | "b"', ['T0: "a" | "b"']),
        ("root::='a'", ['T0: "a"']),
        ('root ::= ("x"|"y")+ # both\n', ['T0: ( "x" | "y" ) +']),
        ('root ::= "a" |\n  "b"\n  "c"', ['T0: "a" | "b" "c"']),
        ('root ::= "a" | ', ['T0: "a" | ""']),
        ('root ::= ( | "a") "b"', ['T0: ( "" | "a" ) "b"']),
        ("root ::=", ['T0: ""']),
        ('root ::= "a"{2} "b"{ 1, } "c"{0,3}', ['T0: "a" {2} "b" {1,} "c" {0,3}']),
        (r'root ::= "\"\\\n\x41\u00e9\U0001F600"', [r'T0: "\"\\\nA\u00e9\ud83d\ude00"']),
        (r"root ::= [a-c_]", [r"T0: /[\x{61}-\x{63}\x{5F}-\x{5F}]/"]),
        (r"root ::= [^\]/\-]", [r"T0: /[^\x{5D}-\x{5D}\x{2F}-\x{2F}\x{2D}-\x{2D}]/"]),
        (r"root ::= [a-]", [r"T0: /[\x{61}-\x{61}\x{2D}-\x{2D}]/"]),
        ("root ::= .", [r"T0: /[\x{0}-\x{10FFFF}]/"]),
        ('root ::= a-b A\na-b ::= "x"\nA ::= "y"', ["T0: T1 T2", 'T1: "x"', 'T2: "y"']),
        ('root ::= "a"{0} ("b" ("c")){0,0} "d"{0,1}', ['T0: "" "" "d" {0,1}']),
        ('root ::= "x" ("a" | root{ 0 })', ['r0: "x" ( "a" | "" )']),
        ('root ::= "(" root ")" | x\nx ::= "x"', ['r0: "(" r0 ")" | T1', 'T1: "x"']),
        ("root ::= b\nb ::= c?\nc ::= b", ["r0: r1", "r1: r2 ?", "r2: r1"]),
    ],
)
def test_rules_are_translated_to_lark(source: str, rules: list[str]) -> None:
    first, *others = to_lark(source).splitlines()
    assert others == rules
    assert first == f"start: {rules[0].partition(':')[0]}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('foo ::= "a"', "has no rule 'root'"),
        ("", "has no rule 'root'"),
        ('"a"', "line 1: expected a rule like root ::= ..., got '\"a\"'"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: rule 'root' is defined twice"),
        ('root ::= "a"\n  foo', "line 2: there is no rule 'foo'"),
        ('root ::= "a" ;', "line 1: cannot read ';'"),
        ('root ::= "a', "line 1: cannot read '\"a'"),
        ("root ::= [a", "line 1: cannot read '[a'"),
        ("root ::= [^]", "line 1: [^] is an empty set"),
        ("root ::= *", "line 1: '*' repeats nothing"),
        ('root ::= "a"+*', "line 1: '*' repeats nothing"),
        ('root ::= ("a"\n', "line 2: 1 '(' without ')'"),
        ('root ::= "a")', "line 1: ')' without '('"),
        ("root ::= [z-a]", "line 1: [z-a] has a range that runs backwards"),
        ('root ::= "a"{3,1}', "line 1: {3,1} asks for at least 3 and at most 1"),
        (r'root ::= "\q"', "line 1: unknown escape \\q"),
        (r'root ::= "\uD800"', "line 1: \\uD800 is no character"),
        (r'root ::= "\U00110000"', "line 1: \\U00110000 is no character"),
        ("root ::= " + "(" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} '('"),
        ("\n".join(f"r{i} ::= 'a'" for i in range(MAX_RULES)) + "\nroot ::= r0", "rules; at most"),
        ("start: a\na[lazy, temperature=0.5]: /x/", "sets the temperature of a rule"),
        ("start: A\n" + "\n".join(f"A{i}: /a/" for i in range(MAX_RULES)), "has more than"),
    ],
    ids=lambda value: value[:30],
)
def test_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_lark(source)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('root ::= "a" x | "b"\nx ::= x "c"', 1),
        ('root ::= "b" | "c"\n | (y{1,2} | z)\ny ::= "a" (z | y+)\nz ::= y', 2),
        ('root ::= "a" root', 1),
        ('root ::= ("a" | "b") ("c" (root))', 1),
    ],
)
def test_a_rule_without_an_end_is_refused(source: str, line: int) -> None:
    with pytest.raises(RequestError, match=f"line {line}: no text of rule '.*' has an end"):
        to_lark(source)


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "a" root | "b"',
        'root ::= "a" root?',
        'root ::= "a" root*',
        'root ::= "a" root{0,3}',
        'root ::= "a" (root |)',
        'root ::= "a" (root | "b" root | ("c" | root) "d")',
        'root ::= x\nx ::= y\ny ::= "(" x ")" | "{2}" z\nz ::= "|" | z',
    ],
)
def test_a_recursion_with_an_end_is_translated(source: str) -> None:
    assert to_lark(source)


def test_a_temperature_in_a_text_is_no_temperature_of_a_rule() -> None:
    lark = 'start: "a[temperature=1]:" b\nb[max_tokens=3]: /[temperature=]/\n'
    assert to_lark(lark) == lark


def test_lark_text_is_returned_unchanged() -> None:
    lark = '// a comment\n?start: "a" B  // ::\nB: /[0-9]/\n'
    assert to_lark(lark) == lark


@given(st.text(alphabet="root:=\"'[]^-+*?{}()|.\\ \nab1,#"))
def test_any_text_is_a_grammar_or_an_error(source: str) -> None:
    with contextlib.suppress(RequestError):
        to_lark(source)
