"""Files that are truncated while they are read, each time in a process of its own with a handler of
SIGBUS, as engines have one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from support.gguf_models import write_model
from support.model_helpers import reference_model, save
from support.programs import result_of, run_source

from shmllm.frontend.gguf.directory import model_directory
from shmllm.sigbus.bus_handler import HANDLERS

pytestmark = pytest.mark.skipif(
    platform.machine() not in HANDLERS, reason=f"no SIGBUS handler for {platform.machine()}"
)

LOADING = """
import json, os, sys
from pathlib import Path
import torch
from shmllm.errors import EngineStartError
from shmllm.models import weights
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.sigbus import bus_guard
assert bus_guard.install()
directory, path = map(Path, sys.argv[1:])
def allocate(shape, dtype):
    return torch.zeros(shape, dtype=dtype)
model = create_model(ModelConfig.from_directory(directory), torch.float32, allocate)
def fails():
    try:
        weights.load_weights(model, directory)
    except EngineStartError as error:
        return str(error)
"""

IN_A_TENSOR = """
content, status, copy = path.read_bytes(), path.stat(), weights._copy
def truncate_and_copy(file, name, views, kind):
    os.truncate(path, 4096)
    copy(file, name, views, kind)
weights._copy = truncate_and_copy
message, missing = fails(), len(model.missing)
weights._copy = copy
path.write_bytes(content)
os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
print(json.dumps([message, missing == len(model.named_weights()), fails()]))
"""


IN_A_VIEW = """
import json, os, sys
from pathlib import Path
import torch
from shmllm.errors import EngineStartError
from shmllm.models.pickle_file import PickleFile
from shmllm.sigbus import bus_guard
assert bus_guard.install()
path = Path(sys.argv[1])
torch.save({"a": torch.ones(2000, 30)[:, ::10]}, path)
file = PickleFile(path)
file.check = lambda name: os.truncate(path, 100_000)  # the copy of the view follows
try:
    with file, file.tensor("a"):
        pass
except EngineStartError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def safetensors(tmp_path: Path) -> tuple[Path, Path]:
    save(reference_model("llama"), tmp_path)
    return tmp_path, tmp_path / "model.safetensors"


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    write_model(path, reference_model("llama", rope_parameters=None))
    return model_directory(path), path


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_the_error_names_the_file_and_another_load_succeeds_if_it_is_back(
    form: str, request: pytest.FixtureRequest
) -> None:
    directory, path = request.getfixturevalue(form)
    done = run_source(LOADING + IN_A_TENSOR, str(directory), str(path))
    message, are_all_missing, second_message = result_of(done)
    assert message.endswith(f"{path.name} has changed while it was read: load it again")
    assert are_all_missing
    assert second_message is None


def test_a_view_in_a_file_of_torch_is_protected_up_to_its_last_number(tmp_path: Path) -> None:
    message = result_of(run_source(IN_A_VIEW, str(tmp_path / "m.bin")))
    assert message.endswith("m.bin has changed while it was read: load it again")
