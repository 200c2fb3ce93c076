"""Finds the Triton kernels that are launched, and the functions that launch them, in the sources.

A kernel is a function with `triton.jit` that some function of the package launches, as in
``_linear[grid](...)``. This module reads the sources and imports none of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kernels" / "shmllm_kernels" / "gpu"
PACKAGE_NAME = "shmllm_kernels.gpu"
CONFORMANCE = ROOT / "tests" / "conformance"


@dataclass(frozen=True)
class Module:
    """What a module of kernels consists of.

    Attributes:
        name: the module's name.
        jitted: the names of its functions with `triton.jit`.
        uses: for each of its functions, the names in it.
        launches: for each of its functions, the names of what it launches: with a grid.
        imports: by name, the module of this package from which it is imported.
    """

    name: str
    jitted: frozenset[str]
    uses: Mapping[str, frozenset[str]]
    launches: Mapping[str, frozenset[str]]
    imports: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Module:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        jitted = {
            f.name for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)
        }
        imports = {
            alias.asname or alias.name: home
            for home, aliases in _imports(tree)
            for alias in aliases
        }
        uses = {f.name: frozenset(_names(f)) for f in functions}
        launched = {f.name: frozenset(_launched(f)) for f in functions}
        return cls(path.stem, frozenset(jitted), uses, launched, imports)


@cache
def modules() -> dict[str, Module]:
    """Returns all modules of kernels by their names."""
    return {path.stem: Module.read(path) for path in sorted(PACKAGE.glob("*.py"))}


def kernels() -> set[str]:
    """Returns all launched kernels as "module.function"."""
    return {kernel for _, _, kernel in _launches()}


def launchers(kernel: str) -> set[str]:
    """Returns the functions that launch a kernel, and those of its module that call these, as
    "module.function"."""
    found = {(module.name, function) for module, function, name in _launches() if name == kernel}
    while True:
        more = {
            (module.name, function)
            for module in modules().values()
            for function, used in module.uses.items()
            if any(name == module.name and called in used for name, called in found)
        }
        if more <= found:
            return {f"{module}.{function}" for module, function in found}
        found |= more


def conformance_files(kernel: str) -> set[str]:
    """Returns the files of tests/conformance that import a function which launches the kernel."""
    wanted = launchers(kernel)
    return {path.stem for path in CONFORMANCE.glob("*.py") if wanted & _imported(path)}


def unused() -> set[str]:
    """Returns the functions with `triton.jit` that nothing launches and no kernel calls."""
    called = {
        f"{module.imports.get(name, module.name)}.{name}"
        for module in modules().values()
        for function, used in module.uses.items()
        for name in used - {function}
    }
    jitted = {f"{module.name}.{name}" for module in modules().values() for name in module.jitted}
    return jitted - called


def _launches() -> Iterator[tuple[Module, str, str]]:
    """Yields each launch: the module and the function that launches, and the kernel."""
    for module in modules().values():
        for function, names in module.launches.items():
            for name in names:
                home = module.imports.get(name, module.name)
                if name in modules()[home].jitted:
                    yield module, function, f"{home}.{name}"


def _launched(function: ast.FunctionDef) -> Iterator[str]:
    """Yields the names in the expressions before the grid of each launch, ``kernel[grid](...)``,
    and in what is assigned to these names."""
    assigned: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in _names(target):
                    assigned.setdefault(name, set()).update(_names(node.value))
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            for name in _names(node.func.value):
                yield from {name, *assigned.get(name, ())}


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


@cache
def _imported(path: Path) -> frozenset[str]:
    """Returns what a file imports from the package: functions, and all that it names of modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = set(_names(tree))
    found = {f"{home}.{alias.name}" for home, aliases in _imports(tree) for alias in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE_NAME:
            found |= {f"{alias.name}.{name}" for alias in node.names for name in named}
    return frozenset(found)


def _imports(tree: ast.AST) -> Iterator[tuple[str, list[ast.alias]]]:
    """Yields each import from a module of the package: the module, and what is imported."""
    for node in ast.walk(tree):
        package, _, home = (getattr(node, "module", None) or "").rpartition(".")
        if isinstance(node, ast.ImportFrom) and package == PACKAGE_NAME:
            yield home, node.names
