"""`shmllm.compat.vllm`: what `import vllm` finds with it, without it, and beside a real vLLM."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version
from support.programs import python, result_of, run_source

import shmllm
from shmllm.compat import vllm as shim
from shmllm.errors import RequestError, ShmLLMError


@pytest.fixture
def installed() -> Iterator[None]:
    shim.install()
    yield
    shim.uninstall()


def is_importable() -> bool:
    return importlib.util.find_spec("vllm") is not None


@pytest.fixture
def real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named vllm on the import path."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "vllm"


def test_vllm_is_importable_only_between_install_and_uninstall() -> None:
    assert not is_importable()
    shim.install()
    assert is_importable()
    importlib.import_module("vllm.sampling_params")
    shim.uninstall()
    assert not is_importable()
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_install_and_uninstall_can_be_repeated() -> None:
    finders = list(sys.meta_path)
    shim.install()
    shim.install()
    assert len(sys.meta_path) == len(finders) + 1
    shim.uninstall()
    shim.uninstall()
    assert sys.meta_path == finders


@pytest.mark.usefixtures("installed")
def test_names_are_those_of_shmllm() -> None:
    vllm = importlib.import_module("vllm")
    assert vllm.SamplingParams is shmllm.SamplingParams
    assert vllm.outputs.RequestOutput is shmllm.RequestOutput  # without an import of the submodule
    assert issubclass(vllm.LLM, shmllm.LLM)
    dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
    assert dead is shmllm.EngineDeadError


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", sorted(shim._MODULES))
def test_every_name_of_every_module_exists(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__
    for name in found.__all__:
        assert getattr(found, name) is not None


@pytest.mark.usefixtures("installed")
def test_the_version_is_found_in_the_metadata() -> None:
    version = importlib.metadata.version("vllm")
    assert version == importlib.import_module("vllm").__version__
    assert Version(version) >= Version("0.33.0")
    assert "shmllm" in version
    names = {item.metadata["Name"] for item in importlib.metadata.distributions()}
    assert "vllm" not in names


@pytest.mark.usefixtures("installed")
def test_missing_names_raise_an_error_with_the_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.worker"):
        importlib.import_module("vllm.worker")
    with pytest.raises(ImportError, match="ModelRegistry"):
        exec("from vllm import ModelRegistry")
    vllm = importlib.import_module("vllm")
    with pytest.raises(AttributeError, match="ModelRegistry"):
        _ = vllm.ModelRegistry
    with pytest.raises(NotImplementedError, match="LoRARequest"):
        vllm.lora.request.LoRARequest("name", 1, "path")


def test_a_real_vllm_is_not_shadowed(real_vllm: Path) -> None:
    with pytest.raises(ShmLLMError, match=str(real_vllm)):
        shim.install()
    assert importlib.util.find_spec("vllm").origin == str(real_vllm / "__init__.py")  # type: ignore[union-attr]


def test_an_imported_vllm_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(ShmLLMError, match="already imported"):
        shim.install()
    shim.uninstall()
    assert "vllm" in sys.modules


def test_installing_imports_neither_torch_nor_transformers() -> None:
    done = run_source(
        """
        import json, sys
        from shmllm.compat import vllm
        vllm.install()
        from vllm import LLM, SamplingParams
        print(json.dumps([name in sys.modules for name in ("torch", "transformers")]))
        """
    )
    assert result_of(done) == [False, False]


def test_names_pickle_without_the_shim() -> None:
    """A pickled object refers to shmllm's class, so a process without the modules can load it."""
    done = run_source(
        """
        import json, pickle
        from shmllm.compat import vllm
        vllm.install()
        from vllm import SamplingParams
        print(json.dumps(list(pickle.dumps(SamplingParams(max_tokens=3)))))
        """
    )
    assert pickle.loads(bytes(result_of(done))) == shmllm.SamplingParams(max_tokens=3)


@pytest.mark.usefixtures("installed")
def test_lora_requests_are_refused() -> None:
    names = importlib.import_module("shmllm.compat.vllm_names")
    with pytest.raises(RequestError, match="LoRA"):
        names.known({"lora_request": object()})
    assert names.known({"lora_request": None, "priority": 0}) == {"priority": 0}


def test_keys_that_are_none_are_removed_from_prompts() -> None:
    names = importlib.import_module("shmllm.compat.vllm_names")
    prompt = {"prompt_token_ids": [1, 2], "multi_modal_data": None}
    assert names.without_nones(prompt) == {"prompt_token_ids": [1, 2]}
    assert names.without_nones([prompt, "text"]) == [{"prompt_token_ids": [1, 2]}, "text"]
    assert names.without_nones("text") == "text"
    assert names.without_nones([1, 2]) == [1, 2]


PROGRAM = """
import sys
from importlib.metadata import version
import vllm
print(sys.argv[1:], version("vllm") == vllm.__version__, __name__)
"""


def test_a_program_runs_with_the_replacement(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(PROGRAM)
    done = python("-m", "shmllm.compat", "client", "--model", "vllm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == "['--model', 'vllm'] True __main__"


def test_a_program_beside_a_real_vllm_is_not_run(tmp_path: Path, real_vllm: Path) -> None:
    (tmp_path / "client.py").write_text(PROGRAM)
    done = python("-m", "shmllm.compat", "client", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert str(real_vllm) in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
