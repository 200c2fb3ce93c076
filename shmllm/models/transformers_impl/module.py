"""Makes transformers' module of a model directory, with parameters that have no memory yet.

This module owns which classes are refused before anything is read but config.json. It must not know
where parameters get their memory, nor what the layers do, which `probe` finds out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shmllm.errors import EngineStartError

OPTION = "model_impl='transformers'"
_OUTPUTS = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
"""What a step does not ask of a module, whatever config.json says."""


_LONGEST_SHOWN = 300


def make_module(directory: Path, dtype: torch.dtype, attention: str) -> Any:
    """Returns the module of a directory's config.json, in evaluation mode. Its parameters are meta
    tensors, and its buffers have their values.

    Args:
        directory: the model's directory.
        dtype: the dtype of the parameters.
        attention: the name of the attention function, see `interface`.

    Raises:
        EngineStartError: transformers cannot make the module, or its class is not one that a paged
            cache serves. The message is one line and names the class.
    """
    config = read_config(directory)
    module_class = find_class(config, directory)
    for text_config in (config, config.get_text_config()):
        for name in _OUTPUTS:
            if hasattr(text_config, name):
                setattr(text_config, name, False)
    without_memory: Any = _without_memory  # torch's annotation says that it returns nothing
    hook = nn.modules.module.register_module_parameter_registration_hook(without_memory)
    try:
        module = module_class._from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        raise refusal(directory, f"transformers cannot make it ({error_words(error)})") from error
    finally:
        hook.remove()
    _keep_wide(module, dtype)
    return module.eval()


def read_config(directory: Path) -> Any:
    """Returns transformers' configuration of a directory. No code of a model is run.

    Raises:
        EngineStartError: transformers does not know the model or refuses a field.
    """
    path = directory / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise EngineStartError(
            f"{path}: transformers {transformers.__version__} cannot read it ({error_words(error)})"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise refusal(directory, "quantized checkpoints are not supported with this option")
    return config


def find_class(config: Any, directory: Path) -> Any:
    """Returns the class that a configuration names.

    Raises:
        EngineStartError: it is none of transformers', or a paged cache does not serve it.
    """
    names = config.architectures
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise refusal(directory, "'architectures' must name the model's class")
    name = names[0]
    found: Any = getattr(transformers, name, None)
    if not _is_module_class(found):
        version = transformers.__version__
        raise refusal(directory, f"transformers {version} has no class {name}")
    if name not in _causal_classes():
        raise refusal(directory, f"{name} is not a causal language model")
    if not isinstance(config, found.config_class):
        raise refusal(directory, f"{name} does not run models of type {config.model_type!r}")
    if config.is_encoder_decoder:
        raise refusal(directory, f"{name} is an encoder-decoder")
    if getattr(found, "_is_stateful", False):
        raise refusal(directory, f"{name} keeps a recurrent state of its own")
    if not found._supports_attention_backend:
        raise refusal(directory, f"{name} does not support transformers' attention interface")
    return found


def refusal(directory: Path, reason: str) -> EngineStartError:
    """Returns the error for a model that this option cannot run; the caller raises it."""
    return EngineStartError(f"{directory / 'config.json'}: {OPTION}: {reason}")


def _is_module_class(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, nn.Module)


def _causal_classes() -> set[str]:
    found: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        found |= {names} if isinstance(names, str) else set(names)
    return found


def _without_memory(module: nn.Module, name: str, parameter: Tensor) -> nn.Parameter | None:
    """A hook of torch: replaces each parameter when a module gets it. Shared ones stay shared."""
    if parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def _keep_wide(module: Any, dtype: torch.dtype) -> None:
    """Makes float32 what the class never has in fewer bits, as its `from_pretrained` does."""
    names = set(module._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        names |= set(module._keep_in_fp32_modules or ())
    if not names or dtype is torch.float32:
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)))
    for name, parameter in module.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.to(torch.float32)


def error_words(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
