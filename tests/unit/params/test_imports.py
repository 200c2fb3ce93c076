"""`shmllm.params` and `shmllm.outputs`: the classes that they export, and a light import."""

from __future__ import annotations

import pytest
from support.programs import result_of, run_source

import shmllm
import shmllm.outputs
import shmllm.params

REPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("shmllm.params", {"torch", "transformers", "tokenizers", "numpy"}),
        ("shmllm.outputs", {"torch", "transformers", "tokenizers"}),
    ],
)
def test_importing_the_package_imports_nothing_heavy(package, heavy):
    assert not heavy & set(result_of(run_source(REPORT, package)))


@pytest.mark.parametrize("package", [shmllm.params, shmllm.outputs])
def test_the_exported_classes_are_those_of_the_top_level_package(package):
    for name in package.__all__:
        assert getattr(shmllm, name, getattr(package, name)) is getattr(package, name)
