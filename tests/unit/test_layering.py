"""Imports follow the arrows between packages that docs/architecture.md draws, without circles.

The test reads the source of every module, including imports inside functions and under
TYPE_CHECKING. There is one rule for each package and for each module in the package root.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = {"shmllm": REPOSITORY, "shmllm_kernels": REPOSITORY / "kernels"}


@dataclass(frozen=True)
class Rule:
    """What the modules of a package may import besides the standard library and each other.

    Attributes:
        modules: packages of this project, anywhere.
        lazy: packages of this project, only inside functions or for type checkers.
        packages: packages of others, anywhere.
        lazy_packages: packages of others, only inside functions.
    """

    modules: str = ""
    lazy: str = ""
    packages: str = ""
    lazy_packages: str = ""


RULES = {
    # The root has only the public names, which type checkers see and which load on first use.
    "shmllm": Rule("version", lazy="errors frontend outputs params"),
    "shmllm.__main__": Rule("cli"),
    "shmllm.version": Rule(),
    "shmllm.errors": Rule(),
    "shmllm.extras": Rule(),
    "shmllm.config": Rule("errors", lazy_packages="torch transformers"),
    "shmllm.plugins": Rule("errors params", lazy="compat", lazy_packages="cloudpickle"),
    "shmllm.params": Rule("errors outputs"),
    "shmllm.sigbus": Rule("errors", lazy_packages="numpy"),
    "shmllm.formats": Rule(
        "errors sigbus", packages="numpy tokenizers", lazy_packages="llguidance transformers"
    ),
    "shmllm.outputs": Rule(packages="numpy", lazy_packages="torch"),
    "shmllm.tracing": Rule(),
    "shmllm.ipc": Rule("errors sigbus", packages="numpy posix_ipc", lazy_packages="cuda torch"),
    "shmllm.shared_kv": Rule("config errors ipc sigbus"),
    "shmllm.wire": Rule("errors ipc outputs params", packages="numpy", lazy_packages="cloudpickle"),
    "shmllm.core": Rule("config errors outputs params plugins"),
    "shmllm.models": Rule(
        "errors formats shmllm_kernels sigbus",
        packages="torch safetensors numpy",
        lazy_packages="gguf tokenizers",
    ),
    "shmllm.models.families": Rule("errors formats models shmllm_kernels", lazy_packages="torch"),
    # Only engines with model_impl="transformers" import it.
    "shmllm.models.transformers_impl": Rule("errors models", packages="torch transformers"),
    "shmllm.worker": Rule(
        "config core errors formats models outputs params plugins shared_kv shmllm_kernels version",
        lazy="parallel",
        packages="torch numpy",
        lazy_packages="cuda llguidance",
    ),
    # Only engines with several ranks import it.
    "shmllm.parallel": Rule(
        "config errors ipc models outputs plugins shmllm_kernels sigbus tracing worker",
        packages="numpy torch",
        lazy_packages="cloudpickle",
    ),
    "shmllm.client": Rule("config errors ipc outputs params tracing wire"),
    # Both ends of a trainer's backends; each module imports torch.distributed in its functions.
    "shmllm.transfer": Rule("errors", lazy_packages="torch"),
    "shmllm.trainer": Rule("config errors transfer"),
    "shmllm.engine": Rule(
        "client config core errors ipc outputs params shared_kv sigbus tracing wire",
        lazy="models plugins transfer worker",
        packages="numpy",
        lazy_packages="torch",
    ),
    "shmllm.frontend": Rule(
        "client config errors extras formats outputs params plugins tracing transfer wire",
        lazy="engine models",
        packages="jinja2 numpy tokenizers",
        lazy_packages="PIL av huggingface_hub llguidance rich soundfile soxr torch transformers",
    ),
    "shmllm.quantize": Rule(
        "errors formats frontend models shmllm_kernels.windows",
        packages="gguf numpy tokenizers torch",
        lazy_packages="compressed_tensors",
    ),
    "shmllm.monitor": Rule("errors ipc outputs", packages="rich"),
    "shmllm.batch": Rule("errors extras outputs params", lazy_packages="numpy pyarrow"),
    "shmllm.bench": Rule(
        "errors frontend ipc monitor outputs params version wire",
        packages="click faster_fifo faster_fifo_reduction iceoryx2 msgspec numpy rich zmq",
    ),
    "shmllm.cli": Rule(
        "batch bench client config errors extras frontend ipc monitor outputs params plugins "
        "shared_kv sigbus quantize tracing version wire",
        packages="click prompt_toolkit",
        lazy_packages="numpy prometheus_client rich",
    ),
    "shmllm.compat": Rule(
        "errors frontend outputs params transfer",
        packages="numpy",
        lazy="models",
        lazy_packages="PIL huggingface_hub peft torch transformers trl",
    ),
    "shmllm_kernels": Rule(),
    "shmllm_kernels.code_tables": Rule(),
    "shmllm_kernels.windows": Rule(),
    "shmllm_kernels.cpu": Rule("shmllm_kernels.code_tables", packages="llvmlite numpy"),
    "shmllm_kernels.reference": Rule("shmllm_kernels.windows", packages="torch numpy"),
    "shmllm_kernels.gpu": Rule(
        "shmllm_kernels.code_tables shmllm_kernels.reference shmllm_kernels.windows",
        packages="torch triton",
    ),
}


@dataclass(frozen=True)
class Import:
    """One imported module; `eager` if importing the importer imports it at once."""

    target: str
    eager: bool
    in_function: bool


def modules() -> dict[str, Path]:
    """All our modules, by name."""
    found = {}
    for package, root in SOURCES.items():
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(source: str) -> Iterator[Import]:
    """All imports in a source text, `import_module("literal")` calls included."""
    has_calls = "import_module" in source
    yield from _imports_in(ast.parse(source), True, False, has_calls)


def _imports_in(node: ast.AST, eager: bool, in_function: bool, has_calls: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if not (has_calls or isinstance(child, STATEMENTS)):
            continue  # expressions import nothing but by calls
        for target in _targets(child):
            yield Import(target, eager, in_function)
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_in(
            child,
            eager and not function and not is_type_checking(child),
            in_function or function,
            has_calls,
        )


def _targets(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            return [name if name in MODULES else module for name in inner]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]) if ast.unparse(node.func).endswith(
            "import_module"
        ):
            return [name]
    return []


def is_below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def rule_of(module: str) -> tuple[str, Rule]:
    """The package of a module, and its rule: the one of its innermost package that has any."""
    parts = module.split(".")
    package = next((".".join(parts[:n]) for n in (3, 2) if ".".join(parts[:n]) in RULES), module)
    assert package in RULES, f"{module} has no rule: say in RULES what {package} may import"
    return package, RULES[package]


def is_allowed(module: str, found: Import) -> bool:
    package, rule = rule_of(module)
    top = found.target.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top not in SOURCES:
        allowed = rule.packages.split() + ([] if found.eager else rule.lazy_packages.split())
        return top in allowed
    if package != "shmllm" and is_below(found.target, package):
        return True
    names = rule.modules.split() + ([] if found.eager else rule.lazy.split())
    full = [name if name.startswith("shmllm_") else f"shmllm.{name}" for name in names]
    return any(is_below(found.target, name) for name in full)


def forbidden(module: str, source: str) -> list[str]:
    return [found.target for found in imports_of(source) if not is_allowed(module, found)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_an_allowed_arrow(module: str) -> None:
    assert forbidden(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_families_are_found_by_the_table_alone() -> None:
    """Nothing but a family imports one, so a new family changes no other module."""
    families = "shmllm.models.families"
    importers = [
        module
        for module, path in MODULES.items()
        if not is_below(module, families)
        and any(is_below(each.target, families) for each in imports_of(path.read_text("utf-8")))
    ]
    assert importers == []


def test_every_rule_has_a_module() -> None:
    assert RULES.keys() == {rule_of(module)[0] for module in MODULES}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("shmllm.ipc.ring", "import shmllm.config.engine", ["shmllm.config.engine"]),
        ("shmllm.ipc.ring", "from shmllm.outputs import request", ["shmllm.outputs.request"]),
        ("shmllm.ipc.ring", "import torch", ["torch"]),
        ("shmllm.ipc.ring", "def f():\n  import torch", []),
        ("shmllm.ipc.ring", "import os, numpy\nfrom shmllm.ipc import layout", []),
        ("shmllm.core.plan", "import numpy", ["numpy"]),
        ("shmllm.core.plan", "from shmllm.ipc.ring import x", ["shmllm.ipc.ring"]),
        ("shmllm.models.rope", "from shmllm.config.engine import x", ["shmllm.config.engine"]),
        ("shmllm.models.families.llama", "from shmllm.models.rope import x", []),
        ("shmllm.models.families.llama", "import torch", ["torch"]),
        ("shmllm.models.families.llama", "import transformers", ["transformers"]),
        ("shmllm.models.transformers_impl.body", "import transformers", []),
        ("shmllm.worker.batch", "from shmllm.core.plan import StepPlan", []),
        ("shmllm.worker.batch", "import shmllm.engine.core", ["shmllm.engine.core"]),
        ("shmllm.engine.core", "import shmllm.worker.arena", ["shmllm.worker.arena"]),
        ("shmllm.engine.core", "def f():\n  import shmllm.worker.arena", []),
        ("shmllm.engine.core", "import shmllm.frontend.llm", ["shmllm.frontend.llm"]),
        ("shmllm.client.private", "import shmllm.engine.core", ["shmllm.engine.core"]),
        ("shmllm.frontend.llm", "if True:\n  import transformers", ["transformers"]),
        ("shmllm.frontend.llm", "def f():\n  import transformers", []),
        ("shmllm.frontend.llm", "import shmllm.engine.local", ["shmllm.engine.local"]),
        ("shmllm.frontend.llm", "def f():\n  import shmllm.engine.local", []),
        ("shmllm.frontend.llm", "import_module('torch')", ["torch"]),
        ("shmllm.frontend.llm", "from shmllm.ipc import ring", ["shmllm.ipc.ring"]),
        ("shmllm.cli.main", "import shmllm.worker", ["shmllm.worker"]),
        ("shmllm.cli.main", "import shmllm.engine.core", ["shmllm.engine.core"]),
        (
            "shmllm.wire.codec",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import shmllm.core.plan",
            ["shmllm.core.plan"],
        ),
        ("shmllm_kernels.gpu.norm", "import shmllm.errors", ["shmllm.errors"]),
    ],
)
def test_the_check_finds_what_is_forbidden(module: str, source: str, expected: list[str]) -> None:
    assert forbidden(module, source) == expected


def module_graph() -> dict[str, set[str]]:
    """The imports between our modules, except those inside functions. Imports for type checkers
    count: two modules that name each other's types depend on each other."""
    graph = {}
    for module, path in MODULES.items():
        found = [i for i in imports_of(path.read_text(encoding="utf-8")) if not i.in_function]
        graph[module] = {item.target for item in found if item.target in MODULES}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of some circle, empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return []

    for module in graph:
        if cycle := visit(module, []):
            return cycle
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert cycle_in(module_graph()) == []


def test_the_cycle_check_finds_one() -> None:
    graph: dict[str, set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert cycle_in(graph) == ["b", "c", "b"]
    graph["c"].remove("b")
    assert cycle_in(graph) == []
