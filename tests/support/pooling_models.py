"""Small random encoders, classifiers and reward models made by transformers, and what reads an
engine's vectors and logits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from support import remote_families
from tokenizers import Tokenizer, models, pre_tokenizers

from shmllm import LLM, LoRARequest
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.sampling import SamplingParams

Vectors = list[npt.NDArray[np.float32]]

VOCAB_SIZE = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ROBERTA = {"pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1}
DECODER = {"num_key_value_heads": 2, "head_dim": 16}
LFM2 = DECODER | {"layer_types": ["conv", "full_attention", "conv"]}
T5 = {"d_model": 64, "d_kv": 12, "d_ff": 128, "num_layers": 3, "num_heads": 4}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 2}),
    "roberta": ("Roberta", ROBERTA),
    "xlm_roberta": ("XLMRoberta", ROBERTA),
    "camembert": ("Camembert", ROBERTA),
    "distilbert": (
        "DistilBert",
        {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "activation": "gelu"},
    ),
    "modernbert": (
        "ModernBert",
        {"num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 3}
        | {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    ),
    "dpr": ("DPR", {"type_vocab_size": 2}),
    "albert": ("Albert", {"embedding_size": 24, "num_hidden_groups": 2}),
    "electra": ("Electra", {"embedding_size": 64}),
    "electra_small": ("Electra", {"embedding_size": 24}),
    "ernie": ("Ernie", {"use_task_id": True}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2, "classifier_pooling": "bos"}),
    "jina_bert": ("JinaBert", {"type_vocab_size": 2}),
    "deberta": (
        "Deberta",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
        | {"max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0},
    ),
    "deberta_v2": (
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 16}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
    ),
    "mpnet": ("MPNet", {"pad_token_id": 1, "max_position_embeddings": 130}),
    "nomic_bert": ("NomicBert", {"type_vocab_size": 2}),
    "t5_encoder": ("T5Encoder", T5),
    "mt5_encoder": ("MT5Encoder", T5),
    "umt5_encoder": ("UMT5Encoder", T5),
    "nomic_moe": ("NomicMoe", {"num_hidden_layers": 4, "type_vocab_size": 1}),
    "gte": ("Gte", {"type_vocab_size": 1}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 7, "sliding_window": 9, "use_bidirectional_attention": True}
        | DECODER,
    ),
    "lfm2": ("Lfm2", LFM2),
    "lfm2_bidirectional": ("Lfm2Bidirectional", LFM2 | {"conv_bias": True}),
    "lfm2_bidir_p2": ("Lfm2BidirP2", LFM2),
    "llama": ("Llama", DECODER),
    "llama_bidirectional": ("LlamaBidirectional", DECODER),
    "mistral": ("Mistral", DECODER | {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", DECODER),
    "privacy_filter": (
        "OpenAIPrivacyFilter",
        DECODER
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"intermediate_size": 32, "pad_token_id": 1, "eos_token_id": 1},
    ),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
}
"""For each name, the name of transformers' configuration class, and what differs from SHAPE."""


def make_pooling_model(kind: str, suffix: str, directory: Path, **config: Any) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        kind: one of RECIPES.
        suffix: the end of the name of the class: "Model", "ForSequenceClassification" and so on.
        directory: where its files are written to.
        config: fields of config.json.
    """
    family, recipe = RECIPES[kind]
    torch.manual_seed(7)
    place = transformers if hasattr(transformers, f"{family}Config") else remote_families
    settings = getattr(place, f"{family}Config")(**(SHAPE | recipe | config))
    model = getattr(place, family + suffix)(settings).eval()
    draw(model)
    model.save_pretrained(directory)
    return model


def rewrite_config(directory: Path, **fields: Any) -> None:
    """Changes fields of a model's config.json; those that are None are removed."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def draw(model: torch.nn.Module) -> None:
    """Draws weights that hide no mistake: norms near 1, biases that are not 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.2)


def write_tokenizer(directory: Path, *words: str) -> None:
    """Writes a tokenizer whose tokens are words: these ones first, then numbers."""
    names = [*words, *map(str, range(VOCAB_SIZE - len(words)))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def pooling_prompts(longest: int = 128, count: int = 12) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens without special ones."""
    rng = random.Random(3)
    lengths = [1, 2, 15, 16, 17, longest] + [rng.randint(3, longest) for _ in range(count - 6)]
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def pool(
    llm: LLM, prompts: Sequence[Any], pooling: Pooling, lora: LoRARequest | None = None
) -> Vectors:
    """The results of an engine, [width] for each prompt; [tokens, width] with ALL."""
    front_end = llm.front_end
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    requests = front_end.inputs.prepare(list(prompts), [params] * len(prompts), min_room=0)
    for request in requests:
        request.submitted.params, request.submitted.lora = pooling, lora
    front_end.add_adapters(requests)
    found: dict[int, npt.NDArray[np.float32]] = {}
    for state in front_end.run_each(requests, False):
        assert state.error is None, state.error
        found[state.index] = np.frombuffer(state.pieces.data, np.float32)
    vectors = [found[index] for index in range(len(prompts))]
    if pooling.type is not PoolingType.ALL:
        return vectors
    return [each.reshape(len(prompt), -1) for each, prompt in zip(vectors, prompts, strict=True)]


def assert_vectors_close(ours: Vectors, wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    """Each difference is within ``tolerance`` of the largest number of its own prompt."""
    for vector, reference in zip(ours, wanted, strict=True):
        assert vector.shape == tuple(reference.shape)
        difference = np.abs(vector - reference.numpy()).max() / float(reference.abs().max())
        assert difference < tolerance, f"relative difference {difference:.2e}"


def write_modules(directory: Path, *modules: tuple[str, dict[str, Any]] | torch.nn.Linear) -> None:
    """Writes what sentence-transformers leaves of the modules behind a transformer.

    Args:
        directory: of the model.
        modules: for each, its class and its fields; or a projection without an activation.
    """
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, module in enumerate(modules, 1):
        kind, fields = ("Dense", {}) if isinstance(module, torch.nn.Linear) else module
        path = directory / f"{number}_{kind}"
        path.mkdir()
        if isinstance(module, torch.nn.Linear):
            weights = {f"linear.{name}": value for name, value in module.state_dict().items()}
            save_file(weights, path / "model.safetensors")
            fields = {
                "in_features": module.in_features,
                "out_features": module.out_features,
                "bias": module.bias is not None,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
        (path / "config.json").write_text(json.dumps(fields))
        listed.append({"path": path.name, "type": f"sentence_transformers.models.{kind}"})
    (directory / "modules.json").write_text(json.dumps(listed))


class RewardModel(torch.nn.Module):
    """Qwen 2 and what Qwen2.5-Math-RM and -PRM have behind it, which transformers lacks.

    Args:
        directory: where its files are written to.
        architecture: the name in config.json.
        num_labels: the number of rewards of a token.
    """

    def __init__(self, directory: Path, architecture: str, num_labels: int) -> None:
        super().__init__()
        self.model = make_pooling_model("qwen2", "Model", directory, num_labels=num_labels)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_labels)
        )
        self.lm_head = torch.nn.Linear(64, VOCAB_SIZE, bias=False)  # checkpoints have one, too
        draw(self.score)
        save_file(self.state_dict(), directory / "model.safetensors")
        rewrite_config(directory, architectures=[architecture])

    def rewards(self, prompt: list[int]) -> torch.Tensor:
        """[tokens, rewards] of a prompt."""
        states = self.model(torch.tensor([prompt])).last_hidden_state[0]
        rewards: torch.Tensor = self.score(states)
        return rewards
