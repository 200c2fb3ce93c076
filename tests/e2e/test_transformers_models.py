"""Models that run with transformers' own modules on our cache: `model_impl="transformers"`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference_models import ReferenceModel, make_model, make_prompts
from support.transformers_models import class_of, make_family, other_families, tiny_config
from support.variants import slow

from shmllm import LLM, EngineStartError, RequestError, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LOCAL: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "multiprocess": False,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 2**24,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "short-chunks": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    "default": {},
    "no-prefix-caching": {"enable_prefix_caching": False},
    "one-at-a-time": {"max_num_seqs": 1},
    "no-hybrid-cache": {"disable_hybrid_kv_cache_manager": True},
    "overlapped-steps": {"async_scheduling": True},
}
QUICK = "exaone4"
"""Windows in three of four layers, which prompts exceed, and one without a rotation."""
FAMILIES = ["flint", "modernbert-decoder"]
RUNS = {
    "bert",
    "bert-generation", "ctrl",
    "electra", "emu3", "ernie",
    "fuyu",
    "jetmoe", "longcat_flash",
    "minimax_m3_vl_text", "mllama",
    "moshi",
    "roc_bert",
}  # fmt: skip
"""The families that run, which docs/models.md lists."""
REFUSED = {
    "is an encoder-decoder": {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
        "pegasus", "plbart", "prophetnet", "whisper",
    },
    "keeps a recurrent state of its own": {
        "bailing_hybrid", "deepseek_v4", "falcon_h1", "kimi_linear", "lara_mini", "olmo_hybrid",
        "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
        "zaya",
    },
    "does not support transformers' attention interface": {
        "big_bird", "bloom", "blt", "cpmant", "git",
        "inkling2_loop_text", "inkling2_text", "inkling_text",
        "megatron-bert", "mpt", "musicgen", "musicgen_melody", "reformer", "rembert",
        "roformer", "trocr", "xlm", "xlnet",
    },
    "its attention has the argument 'indices'": {
        "axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4",
    },
    "its tokens influence each other outside of attention": {"lfm2", "lfm2_moe", "lfm3", "minimax"},
    "a layer calls its attention twice in a forward pass": {"diffllama", "dory", "hrm_text"},
    "its attention counts tokens instead of taking their positions": {"llama4", "llama4_text"},
    "the position of its first token is not 0": {
        "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
        "xlm-roberta-xl",
    },
    "it changes the masks that transformers makes": {"doge"},
    "its mask depends on more than positions": {"gemma4_unified"},
    "it takes no position_ids": {"moss_transcribe_diarize"},
    "cannot run on a paged cache (": {"gemma4_unified_assistant", "xmod"},
}  # fmt: skip
"""By the reason for it, the families that are refused with their usual configuration."""
NOT_MADE = {"gemma4_assistant"}
"""Those of which no small model can be made here: a part of another model."""
REASONS = {family: reason for reason, families in REFUSED.items() for family in families}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: Any) -> ReferenceModel:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("llama")
    return make_model("llama", directory), directory


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("family", "setting"),
    [(QUICK, "short-chunks")]
    + [slow(*pair) for pair in itertools.product([QUICK, *FAMILIES], SETTINGS)],
    indirect=["family"],
)
def test_greedy_tokens_equal_those_of_transformers(family: ReferenceModel, setting: str) -> None:
    with LLM(str(family.directory), **LOCAL | SETTINGS[setting]) as llm:
        family.assert_greedy(tokens_of(llm, family.prompts))
        assert not llm.facts.deterministic


@pytest.mark.parametrize("family", [QUICK, *map(slow, FAMILIES)], indirect=True)
def test_preemption_changes_no_token(family: ReferenceModel) -> None:
    options = LOCAL | {"max_model_len": 112}
    with LLM(str(family.directory), **options) as llm:
        blocks = llm.facts.max_blocks_per_request
    options |= {"num_gpu_blocks_override": 2 * (blocks + 1), "scheduler_reserve_full_isl": False}
    with LLM(str(family.directory), **options) as llm:
        family.assert_greedy(tokens_of(llm, family.prompts))
        assert llm.get_metrics()["preemptions"] > 0


def test_llama_has_the_tokens_of_our_own_implementation(llama: tuple[Any, Path]) -> None:
    model, directory = llama
    prompts = make_prompts(model.config.vocab_size, longest=60)[:8]
    tokens = []
    for model_impl in ("shmllm", "transformers"):
        with LLM(str(directory), **LOCAL | {"model_impl": model_impl}) as llm:
            tokens.append(tokens_of(llm, prompts))
    assert tokens[0] == tokens[1]


def test_what_reads_hidden_states_and_logits(llama: tuple[Any, Path]) -> None:
    """Log-probabilities of prompts and outputs, grammars, vectors, and prompts of embeddings."""
    model, directory = llama
    [prompt] = make_prompts(model.config.vocab_size, longest=40)[8:9]
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    wanted = output.logits[0].log_softmax(-1)
    options = LOCAL | {"skip_tokenizer_init": False, "max_num_batched_tokens": 16}
    with LLM(str(directory), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0)
        [plain] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        scored = zip(plain.prompt_logprobs[1:], prompt[1:], strict=True)
        found = [each[token].logprob for each, token in scored]
        expected = wanted[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)
        first = plain.outputs[0].token_ids[0]
        assert plain.outputs[0].logprobs[0][first].logprob == pytest.approx(
            float(wanted[-1].max()), abs=1e-4
        )
        embeds = model.get_input_embeddings()(torch.tensor(prompt)).detach()
        params = SamplingParams(temperature=0, max_tokens=2)
        [given] = llm.generate([{"prompt_embeds": embeds}], params, use_tqdm=False)
        assert given.outputs[0].token_ids == plain.outputs[0].token_ids
        grammar = SamplingParams(
            max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
        )
        [text] = llm.generate(["x"], grammar, use_tqdm=False)
        assert len(text.outputs[0].text) == 3
        assert set(text.outputs[0].text) <= {"a", "b"}
        [vector] = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        state = output.hidden_states[-1][0, -1]
        torch.testing.assert_close(
            torch.tensor(vector.outputs.embedding), state / state.norm(), atol=1e-5, rtol=1e-4
        )


def test_random_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    """Each norm multiplies by one, as in a new module of transformers, and reloading them restores
    what an update changed."""
    config = tiny_config("gemma")
    config.architectures = ["GemmaForCausalLM"]
    config.save_pretrained(tmp_path)
    prompts = make_prompts(512, longest=20)[:4]
    with LLM(str(tmp_path), load_format="dummy", seed=3, **LOCAL) as llm:
        tokens = tokens_of(llm, prompts)
        norm = llm.collective_rpc("get_weight", args=("model.norm.weight",))[0]
        assert not torch.as_tensor(norm).any()
        llm.update_weights({"model.embed_tokens.weight": torch.ones(512, 64)})
        assert tokens_of(llm, prompts) != tokens
        llm.collective_rpc("reload_weights")
        assert tokens_of(llm, prompts) == tokens


def test_weights_have_the_names_of_files_and_of_modules(tmp_path: Path) -> None:
    """One expert of a file is a part of a parameter; buffers survive a sleep without an update."""
    reference = make_family("glm4_moe", tmp_path)
    names = dict(reference.model.named_parameters())
    expert, fused = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    with LLM(str(tmp_path), **LOCAL) as llm:
        before = tokens_of(llm, reference.prompts)
        stored = llm.collective_rpc("list_weights")[0]
        assert expert in stored
        assert f"{fused}.gate_up_proj" not in stored
        gate_up = names[f"{fused}.gate_up_proj"].detach()
        read = llm.collective_rpc("get_weight", args=(expert,))[0]
        assert torch.equal(torch.as_tensor(read), gate_up[3].chunk(2)[1])
        assert bias in stored
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RequestError, match="weights"):
            tokens_of(llm, reference.prompts)
        llm.update_weights({name: each.detach() for name, each in names.items()})
        assert tokens_of(llm, reference.prompts) == before
        llm.update_weights({expert: torch.zeros_like(gate_up[3].chunk(2)[1])})
        changed = llm.collective_rpc("get_weight", args=(f"{fused}.gate_up_proj",))[0]
        halves = torch.as_tensor(changed)[3].chunk(2)
        assert torch.equal(halves[0], gate_up[3].chunk(2)[0])
        assert not halves[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*other_families(), *REASONS}))
def test_every_family_runs_or_is_refused(model_type: str, tmp_path: Path) -> None:
    if model_type in NOT_MADE:
        pytest.skip("no small model of it can be made here")
    found = class_of(model_type)
    if not found._supports_attention_backend or found._is_stateful:
        config = found.config_class()
        config.architectures = [found.__name__]
        config.save_pretrained(tmp_path)
        options = LOCAL | {"load_format": "dummy"}
        reference = None
    else:
        reference = make_family(model_type, tmp_path)
        options = LOCAL | SETTINGS["short-chunks"]
    if model_type in REASONS:
        with pytest.raises(EngineStartError, match=re.escape(REASONS[model_type])):
            LLM(str(tmp_path), **options)
        return
    assert model_type in RUNS
    assert reference is not None
    with LLM(str(tmp_path), **options) as llm:
        reference.assert_greedy(tokens_of(llm, reference.prompts))
