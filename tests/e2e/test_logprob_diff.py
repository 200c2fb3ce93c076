"""tools/logprob_diff.py: the engine's processed log-probabilities equal the trainer's."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.programs import environment
from support.reference_models import OTHERS, VARIANTS, WITH_INDEXER, make_model
from support.variants import slow

TOOL = Path(__file__).resolve().parents[2] / "tools" / "logprob_diff.py"
BOUNDS = {"float32": 1e-5, "bfloat16": 0.012}
SMOOTH = {"llama", "qwen2", "qwen3", "mistral"}
"""The models that are compared in bfloat16, too. In others a rounding may choose other experts, or
norms of random weights amplify it: the trainer's own bfloat16 is then as far from float32."""
QUICK = ("qwen3", "gpt_oss")
"""One of SMOOTH, and those with sinks and experts, and with states. Other tests compare the
logits of all with those of transformers."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("logprob_diff", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KINDS = [
    kind
    for kind, (family, _) in VARIANTS.items()
    if kind not in ("mistral4", "step3p5", *WITH_INDEXER) and f"{family}Config" not in OTHERS
]
"""All that transformers' Auto class, with which trainers load their models, knows, but for those
whose indexers choose another token where two scores differ by a rounding error."""


@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in KINDS])
def test_log_probabilities_equal_the_trainers(tool: ModuleType, kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    settings = [("float32", 1.0), ("float32", 0.7), ("bfloat16", 0.7)]
    for dtype, temperature in settings if kind in SMOOTH else settings[:2]:
        bound = BOUNDS[dtype]
        found = tool.measure(
            tmp_path,
            dtype,
            temperature,
            (dtype, "float32"),
            (8, 48, 24),
            multiprocess=False,
            num_threads=2,
        )
        for each in found.values():
            assert each.num_tokens == 8 * 24
            assert each.mean <= bound
            assert each.mean <= each.largest
            assert each.correlation > 0.999
            assert each.kl_estimate < bound


def test_a_wrong_temperature_is_detected(tool: ModuleType, tmp_path: Path) -> None:
    """The comparison can fail."""
    from transformers import AutoModelForCausalLM

    from shmllm import LLM

    model = make_model("llama", tmp_path)
    mode = "processed_logprobs"
    with LLM(str(tmp_path), logprobs_mode=mode, multiprocess=False, num_threads=2) as llm:
        sequences = tool.sample(llm, 4, 16, 8, 0.7)
    trainer = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert tool.compare(sequences, trainer, 0.7).mean < 1e-5
    assert tool.compare(sequences, trainer, 1.0).mean > 0.1
    assert model.config.model_type == "llama"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_the_command(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--num-prompts", "4", "--output-len", "8"]
    command = [sys.executable, str(TOOL), *small, "--json", "-"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert record["is_within"]
    assert record["trainers"]["float32"]["num_tokens"] == 32
    assert "correlation" in ran.stderr
    measure = functools.partial(tool.measure, multiprocess=False, num_threads=2)
    monkeypatch.setattr(tool, "measure", measure)
    with pytest.raises(SystemExit) as caught:
        tool.main([*small, "--bound", "1e-12"])
    assert caught.value.code == 1
    assert "exceeds 1.00e-12" in capsys.readouterr().err
