"""`shmllm.compat.vllm`: what `import vllm` finds with it, without it, and beside a real vLLM."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.programs import python, result_of, run_source

import shmllm
from shmllm.compat import __main__ as compat_main
from shmllm.compat import vllm as shim
from shmllm.compat.vllm_modules import ABSENT, MODULES, UNUSABLE, describe_absent
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
    both = {"encoder_prompt": "a", "decoder_prompt": "b"}
    inputs = importlib.import_module("vllm.inputs")
    assert inputs.ExplicitEncoderDecoderPrompt(**both) == both


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_name_of_every_module_exists(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__ or module == "vllm.version" or not MODULES[module]
    for name in MODULES[module].split():
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
@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("import vllm.worker", "nearest thing is: LLM.collective_rpc"),
        ("import vllm.entrypoints.openai.serving_chat", "nearest thing is: there is no server"),
        ("from vllm.entrypoints.openai.protocol import X", "nearest thing is: there is no server"),
        ("from vllm.sampling_params import GuidedDecodingParams", "is: StructuredOutputsParams"),
        ("from vllm import GuidedDecodingParams", "is: StructuredOutputsParams"),
        ("from vllm.multimodal.utils import fetch_video", "prompts take PIL images, arrays"),
        ("from vllm.assets.image import ImageAsset", "prompts take PIL images, arrays"),
        ("from vllm import SamplingParam", "nearest name is vllm.SamplingParams"),
        ("from vllm import BeamSearchParams", "name is vllm.sampling_params.BeamSearchParams"),
        ("from vllm.distributed.parallel_state import get_tp_group", "whose worker has a `rank`"),
        ("from vllm.distributed import get_tensor_model_parallel_rank", "worker has a `rank`"),
        ("from vllm.model_executor.layers.linear import QKVParallelLinear", "LLM.apply_model"),
        ("from vllm.model_executor.models.mixtral import MixtralForCausalLM", "nothing here"),
        ("from vllm.config import SpeculativeConfig", "`speculative_config` takes a dict"),
        ("from vllm.inputs.data import TokensPrompt", "nearest thing is: vllm.inputs"),
        ("from vllm.transformers_utils.tokenizer import get_tokenizer", "is: vllm.tokenizers.get_"),
        ("import vllm; vllm.Nonsense", "nothing here corresponds to it"),
        ("import vllm.platforms as p; p.current_platform.fp8_dtype()", "current_platform.fp8"),
    ],
)
def test_an_absent_name_comes_with_the_nearest_thing(source: str, advice: str) -> None:
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(source)
    assert advice in str(caught.value)
    assert "python -m shmllm.compat" in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_programs_can_ask_whether_a_name_exists() -> None:
    vllm = importlib.import_module("vllm")
    assert not hasattr(vllm, "worker")
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.worker"):
        importlib.import_module("vllm.worker")
    with pytest.raises(ImportError):
        exec("from vllm.sampling_params import GuidedDecodingParams")


def test_no_existing_name_is_listed_as_absent() -> None:
    assert not set(ABSENT) & {module for module, names in MODULES.items() if names}
    assert not set(ABSENT) & {f"{m}.{n}" for m, names in MODULES.items() for n in names.split()}
    assert "vllm.lora.request.LoRARequest" in describe_absent("vllm.LoRARequest")


@pytest.mark.usefixtures("installed")
def test_small_names_have_the_values_of_vllm() -> None:
    sizes = importlib.import_module("vllm.utils.mem_constants")
    assert (sizes.GiB_bytes, sizes.GB_bytes, sizes.KiB_bytes) == (2**30, 10**9, 1024)
    kinds = importlib.import_module("vllm.sampling_params").SamplingType
    assert [kinds.GREEDY, kinds.RANDOM, kinds.RANDOM_SEED] == [0, 1, 2]
    found = importlib.import_module("vllm.v1.metrics.stats").RequestStateStats
    assert found is importlib.import_module("shmllm.outputs.request").RequestMetrics


@pytest.mark.usefixtures("installed")
def test_unusable_names_can_be_imported() -> None:
    vllm = importlib.import_module("vllm")
    with pytest.raises(NotImplementedError, match=r"get_ip .* opens no ports"):
        vllm.utils.network_utils.get_ip()
    names = {"LlamaForCausalLM", "InternVLChatModel", "DeepseekOCRForCausalLM"}
    assert names <= vllm.ModelRegistry.get_supported_archs()
    with pytest.raises(NotImplementedError, match="shmllm/models"):
        vllm.ModelRegistry.register_model("Own", object)


@pytest.mark.usefixtures("installed")
def test_functions_that_end_groups_leave_nothing_to_collect() -> None:
    state = importlib.import_module("vllm.distributed.parallel_state")
    cleanup = importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory

    class Circle:
        pass

    circle: Any = Circle()
    circle.own = circle
    ended = weakref.ref(circle)
    del circle
    state.destroy_model_parallel()
    state.destroy_distributed_environment()
    cleanup()
    assert ended() is None


@pytest.mark.usefixtures("installed")
def test_versions_can_be_compared() -> None:
    vllm = importlib.import_module("vllm")
    assert vllm.__version_tuple__[:3] == (0, 33, 0)
    assert vllm.version.__version__ == vllm.__version__


@pytest.mark.usefixtures("installed")
def test_the_platform_is_the_device_that_torch_finds() -> None:
    platform = importlib.import_module("vllm.platforms").current_platform
    has_gpu = torch.cuda.is_available()
    assert (platform.is_cuda(), platform.is_cpu()) == (has_gpu, not has_gpu)
    assert not any((platform.is_rocm(), platform.is_xpu(), platform.is_tpu()))
    assert platform.device_type == ("cuda" if has_gpu else "cpu")
    assert (platform.get_device_capability() is not None) == has_gpu
    assert platform.has_device_capability((99, 0)) is False
    assert platform.device_count() == torch.cuda.device_count()


@pytest.mark.usefixtures("installed")
def test_helpers_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    vllm = importlib.import_module("vllm")
    vllm.utils.print_utils.print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0], "Vector")
    vllm.utils.print_utils.print_embeddings([0.5])
    assert capsys.readouterr().out == (
        "Vector: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\nEmbeddings: [0.5] (size=1)\n"
    )
    port = vllm.utils.network_utils.get_open_port()
    with socket.create_server(("127.0.0.1", port)):
        assert vllm.utils.network_utils.get_open_port() != port
    assert callable(vllm.transformers_utils.repo_utils.hf_api().snapshot_download)


@pytest.mark.usefixtures("installed")
def test_finish_reasons_are_those_of_outputs() -> None:
    reasons = importlib.import_module("vllm.v1.engine").FinishReason
    assert [str(each) for each in reasons] == ["stop", "length", "abort", "error", "repetition"]
    assert (reasons.STOP, reasons.REPETITION) == (0, 4)


def test_metrics_have_the_names_of_vllm() -> None:
    metrics = importlib.import_module("shmllm.compat.vllm_metrics")
    values = dict.fromkeys([*metrics.GAUGES.values(), *metrics.COUNTERS.values()], 3)
    values |= {"kv_blocks_used": 1, "kv_blocks_total": 4, "step_ns": 5}
    found = {each.name: each for each in metrics.as_metrics(values, "tiny")}
    labels = {"model_name": "tiny", "engine": "0"}
    assert found["vllm:num_requests_running"] == metrics.Gauge(
        "vllm:num_requests_running", labels, 3.0
    )
    assert found["vllm:generation_tokens"] == metrics.Counter("vllm:generation_tokens", labels, 3)
    assert found["vllm:kv_cache_usage_perc"].value == 0.25


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
def test_modules_pickle_by_name() -> None:
    for name in ("vllm", "vllm.lora.request"):
        module = importlib.import_module(name)
        assert pickle.loads(pickle.dumps(module)) is module


@pytest.mark.usefixtures("installed")
def test_a_lora_request_is_one_of_shmllm() -> None:
    own = importlib.import_module("vllm.lora.request").LoRARequest
    assert isinstance(own("a", 1), shmllm.LoRARequest)
    assert pickle.loads(pickle.dumps(own("a", 1))) == shmllm.LoRARequest("a", 1)
    assert own("a", 1, is_3d_lora_weight=True, load_inplace=True).load_inplace

    class WithTensors(own):  # type: ignore[misc, valid-type]
        tensors: dict[str, int]
        scale: float = 1.0

    made = WithTensors("a", lora_int_id=3, tensors={"x": 1})
    assert (made.lora_int_id, made.tensors, made.scale) == (3, {"x": 1}, 1.0)
    with pytest.raises(TypeError, match="needs the keyword argument 'tensors'"):
        WithTensors("a", 3)
    with pytest.raises(TypeError, match="other"):
        WithTensors("a", 3, tensors={}, other=1)


def test_keys_that_are_none_are_removed_from_prompts() -> None:
    names = importlib.import_module("shmllm.compat.vllm_names")
    prompt = {"prompt_token_ids": [1, 2], "multi_modal_data": None}
    assert names.without_nones(prompt) == {"prompt_token_ids": [1, 2]}
    assert names.without_nones(prompt | {"multi_modal_data": {}}) == {"prompt_token_ids": [1, 2]}
    assert names.without_nones([prompt, "text"]) == [{"prompt_token_ids": [1, 2]}, "text"]
    assert names.without_nones("text") == "text"
    assert names.without_nones([1, 2]) == [1, 2]


def test_embeddings_may_have_a_mask_that_says_so() -> None:
    names = importlib.import_module("shmllm.compat.vllm_names")
    rows = torch.zeros(3, 4)
    given = {"prompt_embeds": rows, "prompt_token_ids": [0, 1, 2]}
    assert names.without_nones([given | {"prompt_is_token_ids": [False] * 3}]) == [
        {"prompt_embeds": rows}
    ]
    for mask in ([False, True, False], [False]):
        with pytest.raises(RequestError, match="prompt_is_token_ids must be False for each row"):
            names.without_nones(given | {"prompt_is_token_ids": mask})
    with pytest.raises(RequestError, match="prompt_is_token_ids must be"):
        names.without_nones({"prompt_token_ids": [1], "prompt_is_token_ids": [True]})


def test_processor_kwargs_replace_those_of_prompts() -> None:
    names = importlib.import_module("shmllm.compat.vllm_names")
    prompts = ["a", [1, 2], {"prompt": "b", "mm_processor_kwargs": {"fps": 1}}]
    assert names.with_processor_kwargs(prompts, None) is prompts
    given = {"max_pixels": 9}
    assert names.with_processor_kwargs(prompts, given) == [
        {"prompt": "a", "mm_processor_kwargs": given},
        {"prompt_token_ids": [1, 2], "mm_processor_kwargs": given},
        {"prompt": "b", "mm_processor_kwargs": given},
    ]
    assert names.with_processor_kwargs("a", {}) == [{"prompt": "a", "mm_processor_kwargs": {}}]


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("client.py", "client.py is a file; name its module: python -m shmllm.compat client"),
        ("absent", "there is no module 'absent'"),
        ("absent.part", "there is no module 'absent.part'"),
    ],
)
def test_a_module_that_is_not_there_is_one_line(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(PROGRAM)
    done = python("-m", "shmllm.compat", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"error: {message}")
    assert done.stderr.count(b"\n") == 1


def test_a_program_s_own_import_error_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text("import absent\n")
    done = python("-m", "shmllm.compat", "client", cwd=tmp_path)
    assert done.returncode == 1
    assert b"ModuleNotFoundError: No module named 'absent'" in done.stderr


def test_without_a_module_it_says_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ([], ["--help"]):
        sys_argv = ["shmllm.compat", *argument]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys_argv)
            compat_main.main()
        out = capsys.readouterr().out
        assert "usage: python -m shmllm.compat MODULE" in out
        for name in (*UNUSABLE, *ABSENT, "vllm.inputs", "SamplingParams"):
            assert name in out
        assert max(map(len, out.splitlines())) <= 80
    assert not is_importable()


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    done = run_source(
        """
        import json, subprocess, sys
        process = subprocess.Popen(
            [sys.executable, "-m", "shmllm.compat"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.close()
        errors = process.stderr.read().decode()
        print(json.dumps([process.wait(), errors]))
        """
    )
    assert result_of(done) == [0, ""]
