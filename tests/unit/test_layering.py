"""Imports point the way the design draws them, and nowhere in circles.

Reads the source of every module, imports inside functions and under TYPE_CHECKING
included. A module's rule is the one of its longest matching prefix in RULES.
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
    """What a module may import besides the standard library and its own package.

    Attributes:
        modules: of ours, by prefix, anywhere.
        lazy: of ours, only inside functions.
        packages: of others, anywhere.
        lazy_packages: of others, only inside functions.
    """

    modules: str = ""
    lazy: str = ""
    packages: str = ""
    lazy_packages: str = ""


RULES = {
    "shmllm": Rule(
        "version errors outputs logprobs sampling_params structured_params beam_search "
        "pooling_params pooling_outputs frontend.llm frontend.async_llm frontend.engine_args "
        "frontend.input_processor sleep_report"
    ),  # the names that type checkers see; at run time all but `version` are lazy
    "shmllm.errors": Rule(),
    "shmllm.version": Rule(),
    "shmllm.params.keywords": Rule(),
    "shmllm.outputs.request": Rule("logprobs"),
    "shmllm.outputs.logprob_lists": Rule("logprobs"),
    "shmllm.outputs.logprobs": Rule(packages="numpy"),
    "shmllm.params.structured_outputs": Rule("errors"),
    "shmllm.params.ranges": Rule(),
    "shmllm.params.sampling": Rule("errors options sampling_ranges structured_params"),
    "shmllm.config.engine": Rule("errors graph_config"),
    "shmllm.config.graphs": Rule("errors"),
    "shmllm.frontend.model_files": Rule("errors", lazy_packages="huggingface_hub"),
    "shmllm.ipc": Rule("errors", packages="numpy posix_ipc"),
    "shmllm.ipc.tensors": Rule("errors", packages="numpy", lazy_packages="torch"),
    "shmllm.ipc.packed": Rule("errors", packages="numpy", lazy_packages="torch"),
    "shmllm.params.pooling": Rule("errors options"),
    "shmllm.params.beam_search": Rule("errors logprobs sampling_ranges"),
    "shmllm.outputs.pooling": Rule(packages="numpy", lazy_packages="torch"),
    "shmllm.tracing": Rule(),
    "shmllm.wire": Rule("errors sampling_params pooling_params outputs logprobs", packages="numpy"),
    "shmllm.outputs.sleep_report": Rule(),
    "shmllm.core": Rule(
        "errors config sampling_params pooling_params outputs logprobs sleep_report"
    ),
    "shmllm.models": Rule("errors shmllm_kernels", packages="torch safetensors numpy"),
    "shmllm.worker": Rule(
        "errors config graph_config sampling_params pooling_params outputs logprobs models "
        "core.plan sleep_report shmllm_kernels",
        packages="torch numpy triton",
        lazy_packages="llguidance cuda",
    ),
    "shmllm.worker.gpu.graph_dispatcher": Rule("errors graph_config"),
    "shmllm.engine": Rule(),
    "shmllm.client.launch": Rule("errors config ipc"),
    "shmllm.engine.core": Rule(
        "errors config sampling_params pooling_params outputs core engine.runner engine.sleeper "
        "engine.weight_updates",
        packages="numpy",
    ),
    "shmllm.engine.runner": Rule("config core"),
    "shmllm.engine.weight_updates": Rule(
        "errors", lazy="models.weight_staging", lazy_packages="torch"
    ),
    "shmllm.wire.weight_bucket": Rule("errors ipc wire.values", packages="numpy"),
    "shmllm.engine.output_publisher": Rule("outputs wire engine.core engine.session"),
    "shmllm.client.protocol": Rule(
        "config outputs logprobs tracing wire.messages engine.worker_call"
    ),
    "shmllm.engine.log": Rule(),
    "shmllm.engine.garbage": Rule(),
    "shmllm.engine.sleep": Rule("core sleep_report"),
    "shmllm.client.channel_client": Rule(
        "errors config outputs logprobs wire ipc tracing engine.client_protocol "
        "engine.weight_bucket engine.worker_call engine.worker_client"
    ),
    "shmllm.wire.rpc": Rule("errors wire.values", lazy_packages="cloudpickle"),
    "shmllm.client.rpc_client": Rule("errors ipc wire.values engine.worker_call"),
    "shmllm.engine.worker": Rule(
        "errors engine.core engine.worker_call", lazy="models worker.profile", lazy_packages="torch"
    ),
    "shmllm.engine.rpc_server": Rule(
        "errors ipc wire engine.calls engine.core engine.worker engine.worker_call"
    ),
    "shmllm.engine.admission": Rule("errors engine.core wire.messages"),
    "shmllm.client.private": Rule("errors config wire ipc engine.client engine.launch"),
    "shmllm.client.attached": Rule("errors config wire ipc engine.client"),
    "shmllm.engine.session": Rule("errors outputs logprobs wire ipc"),
    "shmllm.engine.client_acceptor": Rule("errors ipc engine.session"),
    "shmllm.engine.tracer": Rule("outputs core tracing engine.core"),
    "shmllm.engine.tracing": Rule(
        "errors core.observer tracing wire ipc engine.calls engine.core engine.session "
        "engine.tracer"
    ),
    "shmllm.engine.reporter": Rule("engine.core ipc outputs"),
    "shmllm.engine.calls": Rule(
        "errors core.pausing core.sleeping engine.core engine.sleeper wire.messages"
    ),
    "shmllm.engine.process": Rule(
        "errors config outputs wire ipc engine.admission engine.calls engine.core engine.session "
        "engine.doorkeeper engine.garbage engine.log engine.outbox engine.phase engine.reporter "
        "engine.tracing "
        "engine.weight_bucket engine.worker_desk",
        lazy="worker.make_runner",
    ),
    # It answers in the client's terms and takes the messages as objects, not as bytes.
    "shmllm.engine.local": Rule(
        "errors config outputs core.observer tracing wire.messages engine.admission "
        "engine.calls engine.core engine.client engine.tracer engine.weight_bucket "
        "engine.worker engine.worker_call",
        lazy="worker.make_runner",
        lazy_packages="torch",
    ),
    # `wire.messages` holds the dataclasses that EngineClient takes; bytes stay behind it.
    "shmllm.frontend": Rule(
        "errors config graph_config options outputs sampling_params structured_params logprobs "
        "logprob_lists model_files pooling_params pooling_outputs beam_search sampling_ranges "
        "engine.client engine.private engine.weight_bucket engine.worker_call tracing "
        "wire.messages sleep_report",
        lazy="engine.local engine.attached",
        packages="numpy tokenizers",
        lazy_packages="jinja2 llguidance rich transformers",
    ),
    "shmllm.frontend.engine_view": Rule(
        "config engine.worker_call sleep_report", lazy_packages="torch transformers"
    ),
    "shmllm.frontend.text.template_environment": Rule(packages="jinja2"),
    # Looks at engines from outside, through their segments alone.
    "shmllm.monitor": Rule("errors ipc"),
    "shmllm.monitor.screen": Rule("ipc.stats", packages="rich"),
    "shmllm.monitor.live": Rule(packages="rich"),
    # Files and formats: over anything that makes outputs of requests.
    "shmllm.batch": Rule("errors outputs sampling_params"),
    "shmllm.batch.parquet": Rule("errors", lazy_packages="pyarrow"),
    "shmllm.cli": Rule(
        "version errors config options outputs sampling_params model_files frontend engine ipc "
        "bench wire batch monitor tracing sleep_report",
        packages="click",
        lazy_packages="numpy rich prometheus_client",
    ),
    "shmllm.bench": Rule(
        "errors version outputs sampling_params ipc wire",
        packages="numpy click msgspec zmq faster_fifo faster_fifo_reduction iceoryx2 rich",
    ),
    # Benchmarks of a whole engine: they run requests and look at the engine from outside.
    "shmllm.bench.generation": Rule("frontend sampling_params", packages="numpy"),
    "shmllm.bench.startup": Rule("errors"),
    "shmllm.bench.startup_marks": Rule("ipc monitor"),
    # What stands behind vLLM's names is the public API, looked up when a client uses it.
    "shmllm.compat": Rule(
        "errors outputs pooling_outputs sampling_params structured_params frontend",
        lazy="model_files",
        lazy_packages="torch transformers trl",
    ),
    "shmllm_kernels": Rule(),
    "shmllm_kernels.cpu": Rule(packages="llvmlite numpy"),
    "shmllm_kernels.reference": Rule(packages="torch numpy"),
    "shmllm_kernels.gpu": Rule(packages="torch triton"),
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


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(source: str) -> Iterator[Import]:
    """All imports in a source text, `import_module("literal")` calls included."""
    yield from _imports_in(ast.parse(source), eager=True, in_function=False)


def _imports_in(node: ast.AST, eager: bool, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child):
            yield Import(target, eager, in_function)
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_in(
            child,
            eager and not function and not is_type_checking(child),
            in_function or function,
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
    """The rule of the longest prefix, and that prefix. Only `shmllm` itself has the root's."""
    prefixes = [name for name in RULES if is_below(module, name) and name != "shmllm"]
    if module == "shmllm":
        return "shmllm", RULES["shmllm"]
    assert prefixes, f"{module} has no rule: say in RULES what it may import"
    longest = max(prefixes, key=len)
    return longest, RULES[longest]


def own_package(module: str) -> str | None:
    """The package whose modules import each other freely; those of engine are apart."""
    package = ".".join(module.split(".")[: 1 if module.startswith("shmllm_kernels") else 2])
    return None if package in ("shmllm", "shmllm.engine") else package


def is_allowed(module: str, found: Import) -> bool:
    _, rule = rule_of(module)
    top = found.target.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top not in SOURCES:
        allowed = rule.packages.split() + (rule.lazy_packages.split() if found.in_function else [])
        return top in allowed
    package = own_package(module)
    if package is not None and is_below(found.target, package):
        return True
    names = rule.modules.split() + (rule.lazy.split() if found.in_function else [])
    full = [name if name.startswith("shmllm_") else f"shmllm.{name}" for name in names]
    return any(is_below(found.target, name) for name in full)


def forbidden(module: str, source: str) -> list[str]:
    return [found.target for found in imports_of(source) if not is_allowed(module, found)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_an_allowed_arrow(module: str) -> None:
    assert forbidden(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_every_rule_has_a_module() -> None:
    packages = {rule_of(module)[0] for module in MODULES}
    assert RULES.keys() - packages <= {"shmllm.engine"}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("shmllm.ipc.ring", "import shmllm.config.engine", ["shmllm.config.engine"]),
        ("shmllm.ipc.ring", "from shmllm.outputs import request", ["shmllm.outputs.request"]),
        ("shmllm.ipc.ring", "import torch", ["torch"]),
        ("shmllm.ipc.ring", "import os, numpy\nfrom shmllm.ipc import layout", []),
        ("shmllm.core.plan", "import numpy", ["numpy"]),
        ("shmllm.core.plan", "from shmllm.ipc.ring import x", ["shmllm.ipc.ring"]),
        ("shmllm.models.llama", "from shmllm.config.engine import x", ["shmllm.config.engine"]),
        ("shmllm.worker.batch", "from shmllm.core.plan import StepPlan", []),
        ("shmllm.worker.batch", "import shmllm.core.request", ["shmllm.core.request"]),
        ("shmllm.engine.core", "import shmllm.worker.cpu.runner", ["shmllm.worker.cpu.runner"]),
        (
            "shmllm.engine.core",
            "import shmllm.client.channel_client",
            ["shmllm.client.channel_client"],
        ),
        ("shmllm.engine.process", "def f():\n  import shmllm.worker.make_runner", []),
        ("shmllm.engine.process", "import shmllm.worker.cpu.runner", ["shmllm.worker.cpu.runner"]),
        ("shmllm.frontend.llm", "if True:\n  import transformers", ["transformers"]),
        ("shmllm.frontend.llm", "def f():\n  import transformers", []),
        ("shmllm.frontend.llm", "def f():\n  import torch", ["torch"]),
        ("shmllm.frontend.llm", "import_module('torch')", ["torch"]),
        ("shmllm.frontend.llm", "from shmllm.wire import codec", ["shmllm.wire.codec"]),
        ("shmllm.cli.main", "import shmllm.worker", ["shmllm.worker"]),
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


def eager_graph() -> dict[str, set[str]]:
    """Which of our modules a module's import imports at once."""
    graph = {}
    for module, path in MODULES.items():
        found = imports_of(path.read_text(encoding="utf-8"))
        graph[module] = {item.target for item in found if item.eager and item.target in MODULES}
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
    assert cycle_in(eager_graph()) == []


def test_the_cycle_check_finds_one() -> None:
    graph: dict[str, set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert cycle_in(graph) == ["b", "c", "b"]
    graph["c"].remove("b")
    assert cycle_in(graph) == []
