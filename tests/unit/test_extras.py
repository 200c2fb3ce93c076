"""The commands in hints install what the extra needs, from a checkout, too."""

from __future__ import annotations

import configparser
import re
from importlib import metadata
from pathlib import Path

import pytest

from shmllm import extras

ROOT = Path(__file__).resolve().parents[2]


def declared() -> dict[str, list[str]]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    section = parser["options.extras_require"]
    return {name: section[name].split() for name in section}


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata that an installation of this tree has."""
    lines = [f'{p}; extra == "{name}"' for name, packages in declared().items() for p in packages]
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2", *lines])


@pytest.mark.usefixtures("requirements")
@pytest.mark.parametrize("extra", ["metrics", "parquet", "bench"])
def test_the_command_names_the_packages_of_the_extra(extra: str) -> None:
    assert extras.packages_of(extra) == declared()[extra]
    quoted = " ".join(f"'{package}'" for package in declared()[extra])
    assert extras.install_command(extra) == f"pip install {quoted}"


def test_a_tree_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_found)
    assert extras.install_command("rl") == "pip install '.[rl]' in the source tree"


def test_no_code_names_a_distribution_that_no_index_has() -> None:
    pattern = re.compile(r"pip install '?shmllm")
    sources = [*ROOT.glob("shmllm/**/*.py"), *ROOT.glob("examples/*"), *ROOT.glob("docs/*.md")]
    assert not [str(p) for p in sources if p.is_file() and pattern.search(p.read_text())]
