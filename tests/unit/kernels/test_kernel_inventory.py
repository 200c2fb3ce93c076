"""Every Triton kernel that is launched has a test against a reference, which runs interpreted and
on a GPU, and facts about its compiled code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.kernel_facts import FACTS
from support.kernel_inventory import CONFORMANCE, PACKAGE, ROOT, conformance_files, kernels, unused

INTERPRETED = ROOT / "tests/unit/kernels/triton"
ON_A_GPU = ROOT / "tests/gpu/kernels"


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def suites_of(directory: Path) -> set[str]:
    """Return the files of tests/conformance whose suites a folder runs."""
    modules = set().union(*(imported_modules(path) for path in directory.glob("test_*.py")))
    return {module.removeprefix("conformance.") for module in modules}


def test_the_search_finds_all_forms_of_launches() -> None:
    found = kernels()
    assert "norm._rms_norm" in found  # launched by its name
    assert {
        "experts_kernel.multiply_gate_and_up",
        "experts_kernel.multiply_up",
    } <= found  # one of two
    assert "single_row_kernel.multiply_single_row" in found  # assigned to a variable
    assert "packed_row_kernel.multiply_packed_row" in found
    assert len(found) >= 49
    assert (PACKAGE / "norm.py").is_file()


def test_every_launched_kernel_has_facts_and_each_fact_a_kernel() -> None:
    assert FACTS.keys() == kernels()


def test_no_kernel_is_unused() -> None:
    assert unused() == set()


@pytest.mark.parametrize("directory", [INTERPRETED, ON_A_GPU], ids=["interpreted", "gpu"])
def test_every_kernel_is_tested(directory: Path) -> None:
    suites = suites_of(directory)
    untested = {kernel for kernel in kernels() if not conformance_files(kernel) & suites}
    assert untested == set()


def test_every_suite_of_kernels_has_a_reference() -> None:
    for kernel in sorted(kernels()):
        own = conformance_files(kernel)
        with_reference = {
            name
            for name in own
            if any(
                module.startswith("shmllm_kernels.reference")
                for module in imported_modules(CONFORMANCE / f"{name}.py")
            )
        }
        assert with_reference, f"{kernel}: {own}"
