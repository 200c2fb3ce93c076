"""Kernels use only what all supported versions of Triton compile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernel_inventory import PACKAGE


def jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def absent_names(function: ast.FunctionDef) -> set[str]:
    """Return the variables that a function sets to None."""
    found: set[str] = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            found |= {
                name.id for name, value in pairs if isinstance(name, ast.Name) and is_none(value)
            }
    return found


def parts_of(value: ast.AST) -> Iterator[ast.AST]:
    """Yield the elements of a tuple, or of a named one, and those of tuples in it."""
    elements: list[ast.expr] = []
    if isinstance(value, ast.Tuple):
        elements = value.elts
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        elements = value.args if value.func.id[0].isupper() else []
    for element in elements:
        yield element
        yield from parts_of(element)


def returned_with_none(source: str) -> list[str]:
    """Return the functions that return a tuple which may contain None, or a literal None: Triton
    3.6 compiles neither. A variable that may be None is possible."""
    found = []
    for function in jitted(ast.parse(source)):
        absent = absent_names(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            parts = list(parts_of(node.value))
            names = {each.id for each in parts if isinstance(each, ast.Name)}
            if any(map(is_none, [node.value, *parts])) or names & absent:
                found.append(function.name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_no_kernel_returns_a_tuple_with_none(path: Path) -> None:
    assert returned_with_none(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("body", "is_possible"),
    [
        ("a, b = None, x\n    return a, b", False),
        ("a = None\n    if x:\n        a = x\n    return Rows(x, a)", False),
        ("return None, x", False),
        ("return None", False),
        ("a = None\n    if x:\n        a = Rows(x, x)\n    return a", True),
        ("a = None\n    use(x, a)\n    return x, x", True),
        ("return f(x, None), x[:, None]", True),
    ],
)
def test_the_search_finds_such_functions(body: str, is_possible: bool) -> None:
    source = f"@triton.jit\ndef f(x):\n    {body}\n"
    assert returned_with_none(source) == ([] if is_possible else ["f"])
