"""The argument `lora_request`: which adapter each request is computed with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shmllm.config.info import EngineInfo
from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.params.items import MODALITIES
from shmllm.params.lora import MAX_ID, LoRARequest

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""The argument `lora_request`: one adapter for all prompts, or for each one or None."""
OPTION = "default_mm_loras"

logger = logging.getLogger(__name__)


def read_default_adapters(
    option: Mapping[str, object] | None, enable_lora: bool
) -> dict[str, LoRARequest]:
    """Return the adapter of each modality that the option names. As in vLLM, its name is the
    modality, and its number the place of that in the alphabet.

    Args:
        option: the directory of the adapter of each modality; None: none.
        enable_lora: whether the engine has adapters.

    Raises:
        EngineStartError: a modality does not exist, or a directory is no text; or the engine has no
            adapters.
    """
    if option and not enable_lora:
        raise EngineStartError(f"{OPTION} needs enable_lora=True")
    found: dict[str, LoRARequest] = {}
    for number, (modality, path) in enumerate(sorted((option or {}).items()), 1):
        if modality not in MODALITIES or not isinstance(path, str) or not path:
            raise EngineStartError(
                f"{OPTION} is a mapping from {', '.join(MODALITIES)} to directories of "
                f"adapters, got {modality!r}: {path!r}"
            )
        found[modality] = LoRARequest(modality, number, path)
    return found


class RequestAdapters:
    """Sets the adapters of requests.

    Args:
        info: the engine's info.
        defaults: the adapters of prompts with items that name none, by modality. The model may have
            one of its own for sounds.
    """

    def __init__(self, info: EngineInfo, defaults: Mapping[str, LoRARequest]) -> None:
        self._info = info
        self._defaults = dict(defaults)
        if directory := info.items.sound_adapter:
            self._defaults.setdefault("audio", LoRARequest("audio", MAX_ID, directory))

    def set(self, requests: list[PreparedRequest], lora_request: Adapters) -> list[PreparedRequest]:
        """Set the adapters of the requests, and return the requests.

        Args:
            requests: the requests of the batch.
            lora_request: one adapter for all requests, or for each one or None; None: no adapters
                but the default ones, and that of the model.

        Raises:
            RequestError: a value is no LoRARequest, the numbers of requests and adapters differ, or
                the engine has no adapters.
        """
        if lora_request is not None:
            self._set_given(requests, lora_request)
        if self._defaults:
            for request in requests:
                if request.submitted.lora is None:
                    request.submitted.lora = self._default_of(request)
        return requests

    def _set_given(
        self,
        requests: list[PreparedRequest],
        lora_request: LoRARequest | Sequence[LoRARequest | None],
    ) -> None:
        is_one = isinstance(lora_request, LoRARequest)
        values = [lora_request] * len(requests) if is_one else lora_request
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise RequestError(
                f"lora_request must be a LoRARequest or a list of them, got {values!r}"
            )
        if len(values) != len(requests):
            raise RequestError(f"{len(requests)} prompts and {len(values)} lora_requests")
        for request, value in zip(requests, values, strict=True):
            request.submitted.lora = self.check(value)

    def _default_of(self, request: PreparedRequest) -> LoRARequest | None:
        found = {each.modality for each in request.submitted.items} & self._defaults.keys()
        if len(found) > 1:
            logger.warning(
                "a prompt with %s gets none of the adapters of %s: a request has one, so name it "
                "by lora_request",
                " and ".join(sorted(found)),
                OPTION,
            )
        if len(found) != 1:
            return None
        adapter = self._defaults[found.pop()]
        if not self._info.max_loras:
            raise RequestError(
                f"the model has an adapter for prompts with sounds, in {adapter.lora_path}: start "
                "the engine with enable_lora=True, and a max_lora_rank of the `r` in "
                "adapter_config.json"
            )
        return adapter

    def check(self, lora_request: object) -> LoRARequest | None:
        """Return the adapter of a request, or None.

        Raises:
            RequestError: it is neither a LoRARequest nor None, or the engine has no adapters.
        """
        if lora_request is None:
            return None
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {lora_request!r}")
        if not self._info.max_loras:
            raise RequestError(
                f"lora_request {lora_request.lora_name!r} has no effect: this engine has no "
                "adapters; start it with enable_lora=True"
            )
        return lora_request
