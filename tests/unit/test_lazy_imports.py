"""A front end is up before torch would be: it imports neither torch nor transformers."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest
from support.programs import result_of, run_source

import shmllm

HEAVY = {"torch", "transformers", "triton"}
UNNEEDED_AT_FIRST = HEAVY | {
    "numpy",
    "tokenizers",
    "jinja2",
    "rich",
    "huggingface_hub",
    "prompt_toolkit",
}

REPORT = """
import json, sys
packages = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(packages)))
"""
QUIET_HELP = """
import contextlib, io, sys
from shmllm.cli.main import main
sys.argv = ["shmllm", *sys.argv[1:]]
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main()
assert "Usage: shmllm" in shown.getvalue(), shown.getvalue()
"""


ALIASES = {"AsyncLLMEngine": "AsyncLLM"}


def imported_by(source: str, *arguments: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a source text."""
    return set(result_of(run_source(source + REPORT, *arguments)))


def modules_after(source: str) -> set[str]:
    """All modules that a fresh interpreter holds after a source text, with dotted names."""
    report = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    return set(result_of(run_source(source + report)))


def test_the_report_sees_an_import() -> None:
    assert "numpy" in imported_by("import numpy")


def test_importing_the_package_imports_next_to_nothing() -> None:
    found = imported_by("import shmllm; shmllm.__version__; dir(shmllm)")
    assert "shmllm" in found
    assert not found & UNNEEDED_AT_FIRST


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["embed", "--help"],
        ["score", "--help"],
        ["chat", "--help"],
        ["--version"],
    ],
)
def test_help_imports_next_to_nothing(arguments: list[str]) -> None:
    source = QUIET_HELP if "--help" in arguments else QUIET_HELP.replace("Usage: ", "")
    found = imported_by(source, *arguments)
    assert "click" in found
    assert not found & UNNEEDED_AT_FIRST


def test_the_public_classes_import_nothing_heavy() -> None:
    found = imported_by("from shmllm import *; LLM, SamplingParams")
    assert {"shmllm", "tokenizers"} <= found
    assert not found & HEAVY


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "shmllm.frontend.llm",
            HEAVY | {"jinja2", "llguidance", "rich", "huggingface_hub", "prompt_toolkit"},
        ),
        ("shmllm.frontend.llm", {"shmllm.engine", "shmllm.client.attached", "shmllm.core"}),
        ("shmllm.client.attached", HEAVY | {"shmllm.engine", "shmllm.frontend", "cloudpickle"}),
        ("shmllm.wire.rpc", HEAVY | {"cloudpickle"}),
        ("shmllm.core.scheduler", HEAVY | {"shmllm.ipc", "shmllm.wire"}),
        ("shmllm.engine.core", HEAVY | {"shmllm.worker", "shmllm.models"}),
        ("shmllm.engine.process", HEAVY | {"shmllm.worker", "shmllm.models", "shmllm.frontend"}),
        ("shmllm.ipc.channel", HEAVY),
        ("shmllm.monitor.find", HEAVY | {"rich"}),
        ("shmllm.batch.job", HEAVY | {"pyarrow", "shmllm.frontend"}),
        ("shmllm.outputs", HEAVY),
        ("shmllm.params", HEAVY | {"numpy"}),
        ("shmllm.config.engine", HEAVY | {"numpy"}),
        ("shmllm.models.config", HEAVY),
    ],
)
def test_a_module_loads_without(module: str, forbidden: set[str]) -> None:
    assert not modules_after(f"import {module}") & forbidden


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_whole_generation_imports_nothing_heavy() -> None:
    found = imported_by(
        """
from shmllm import LLM, SamplingParams, StructuredOutputsParams
with LLM("tiny") as llm:
    (output,) = llm.generate("import os", SamplingParams(max_tokens=3), use_tqdm=True)
    assert len(output.outputs[0].token_ids) == 3
    import sys
    assert "llguidance" not in sys.modules
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    llm.generate("x", SamplingParams(structured_outputs=constraint), use_tqdm=False)
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))
"""
    )
    assert not found & HEAVY


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff's RUF022 asks for."""
    if name.isupper():
        return 0, name
    return (1, name) if name[0].isupper() else (2, name)


def test_all_is_sorted_and_every_name_resolves() -> None:
    assert shmllm.__all__ == sorted(set(shmllm.__all__), key=order)
    for name in shmllm.__all__:
        value = getattr(shmllm, name)
        assert name == "__version__" or value.__name__ == ALIASES.get(name, name)


def test_all_is_what_can_be_imported() -> None:
    assert dir(shmllm) == sorted(shmllm.__all__)
    with pytest.raises(AttributeError, match="'shmllm' has no attribute 'LMM'"):
        _ = shmllm.LMM


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(shmllm.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*homes, "__version__"} == set(shmllm.__all__)
    for name, home in homes.items():
        assert getattr(shmllm, name) is getattr(import_module(home), name)


def test_parameters_load_no_numpy() -> None:
    assert "numpy" not in imported_by("from shmllm import SamplingParams, RequestError")
