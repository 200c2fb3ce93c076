"""Parameters of pooling requests, which turn a prompt into a vector, or into one of each token.

PoolingParams is the class that users construct, with vLLM's names. Pooling is the form of it that
the engine uses. This module must not know how vectors are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.late_pooling import LateChunkingParams, LateInteractionParams
from shmllm.params.pooling_ranges import check_choice, check_fields
from shmllm.params.pooling_tasks import PLUGIN_TASK, POOLING_TYPES, TOKEN_TASKS, check_task
from shmllm.params.sampling import RequestOutputKind

STEP = "STEP"
EMBEDDING_PARAMETERS = ("dimensions", "use_activation")
VALID_PARAMETERS: dict[str, tuple[str, ...]] = {
    "embed": EMBEDDING_PARAMETERS,
    "classify": ("use_activation",),
    "token_embed": EMBEDDING_PARAMETERS,
    "token_classify": ("use_activation",),
}
"""The parameters that each task has, besides those of a pooling type."""
STEP_PARAMETERS = ("step_tag_id", "returned_token_ids")


class PoolingType(IntEnum):
    """The hidden states that the result is made of.

    LAST: the hidden state of the last token. MEAN: the mean of the hidden states of all tokens.
    CLS: the hidden state of the first token. ALL: a row for each token. MAX: the largest of the
    head's results for all tokens, each component by itself.
    """

    LAST = 1
    MEAN = 2
    CLS = 3
    ALL = 4
    MAX = 5


WHOLE_PROMPTS = (PoolingType.MEAN, PoolingType.CLS, PoolingType.MAX)
"""The types that need hidden states of which a prefix cache has none."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the engine pools a prompt's hidden states, which it takes after the final norm.

    Attributes:
        type: the hidden states that the result is made of.
        dimensions: the number of leading components to keep; 0 keeps all.
        normalize: whether to divide the vector, after truncation to `dimensions`, by its
            Euclidean norm.
        reads_prefix_cache: whether prefix-cache hits may be used. Always False for MEAN, CLS and
            MAX, which need hidden states that are not cached; with ALL the tokens of a hit have no
            rows.
        uses_head: whether the model's projection or classifier is applied, before `dimensions`.
        second_segment: the index of the first token of the second text of a pair, for models whose
            tokens have types; 0: there is none.
        num_skipped: how many tokens at the beginning a mean leaves out.
    """

    type: PoolingType = PoolingType.LAST
    dimensions: int = 0
    normalize: bool = True
    reads_prefix_cache: bool = True
    uses_head: bool = False
    second_segment: int = 0
    num_skipped: int = 0

    def __post_init__(self) -> None:
        if self.type in WHOLE_PROMPTS and self.reads_prefix_cache:
            object.__setattr__(self, "reads_prefix_cache", False)


@dataclass(slots=True)
class PoolingParams:
    """Parameters of one pooling request.

    Args:
        use_activation: normalize embeddings to length 1, or make scores of logits. None uses the
            value of the LLM's `pooler_config`, or the model's.
        dimensions: the number of leading components to keep before normalization, for models
            that were trained for it (Matryoshka); None uses the value of the `pooler_config`,
            or keeps all.
        step_tag_id, returned_token_ids: see PoolerConfig; only with the pooling type "STEP".
        task: see PoolerConfig; None takes the task of the call.
        requires_token_ids: accepted for compatibility; token ids are always known.
        skip_reading_prefix_cache: compute the whole prompt, without prefix-cache hits. None means
            True for tasks whose results have a row for each token: tokens of a hit have none.
        late_interaction_params: see LateInteractionParams; only with token_embed.
        extra_kwargs: for `score`: "max_tokens_per_query", "max_tokens_per_doc" and
            "chat_template_kwargs"; see `LLM.score`.
        output_kind: FINAL_ONLY.
        late_chunking_params: see LateChunkingParams; only with token_embed.
        pooling_type: see PoolerConfig; None uses the value of the `pooler_config`, or the model's.
            vLLM's class does not have this field: its engine has one pooling type for all requests.

    Raises:
        RequestError: a field is out of its range. The message contains the field, its value
            and the range.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None
    pooling_type: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RequestError if a field is out of its range.

        The constructor checks, too. This method finds values that were assigned afterwards.
        """
        check_task(self.task)
        check_fields(self)
        check_choice("pooling_type", self.pooling_type, POOLING_TYPES)
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            raise _error(
                "output_kind",
                self.output_kind,
                f"For pooling output_kind has to be FINAL_ONLY, got {self.output_kind!r}",
            )
        if not isinstance(self.extra_kwargs, dict | None):
            given = self.extra_kwargs
            raise _error(
                "extra_kwargs", given, f"extra_kwargs must be None or a dict, got {given!r}"
            )
        for name, kind in _CLASSES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kind):
                message = f"{name} must be None or a {kind.__name__}, got {value!r}"
                raise _error(name, value, message)
            value.__post_init__()

    def clone(self) -> PoolingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def verify(self, model_config: Any) -> None:
        """Fill in the defaults of a model for the `task`, and check that they go together.

        Args:
            model_config: has `pooler_config`, a PoolerConfig or None. If `dimensions` are asked
                for, it has `is_matryoshka`, `matryoshka_dimensions`, `embedding_size` and
                `served_model_name`, too.

        Raises:
            RequestError: a parameter is not one of the task's, or not possible with the model.
        """
        self._check_late_params()
        if self.task == PLUGIN_TASK and self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = True
        if self.task not in VALID_PARAMETERS:
            return
        if model_config.pooler_config is not None:
            self._merge_defaults(model_config.pooler_config, self.task)
        if self.use_activation is None:
            self.use_activation = True
        if self.dimensions is not None and "dimensions" in VALID_PARAMETERS[self.task]:
            _check_dimensions(self.dimensions, model_config)
        self._refuse(n for n in EMBEDDING_PARAMETERS if n not in VALID_PARAMETERS[str(self.task)])

    def _merge_defaults(self, pooler_config: Any, task: str) -> None:
        self._take_defaults(pooler_config, VALID_PARAMETERS[task])
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = task in TOKEN_TASKS
        kind = self.pooling_type or pooler_config.tok_pooling_type
        if kind == STEP and task in TOKEN_TASKS:
            self._take_defaults(pooler_config, STEP_PARAMETERS)
        else:
            self._refuse(STEP_PARAMETERS, "; the pooling type is not STEP")

    def _take_defaults(self, pooler_config: Any, names: Iterable[str]) -> None:
        for name in names:
            if getattr(self, name) is None:
                setattr(self, name, getattr(pooler_config, name, None))

    def _refuse(self, names: Iterable[str], reason: str = "") -> None:
        if given := [name for name in names if getattr(self, name) is not None]:
            valid = list(VALID_PARAMETERS[str(self.task)])
            raise _error(
                given[0],
                getattr(self, given[0]),
                f"Task {self.task!r} only supports {valid} parameters, does not support {given} "
                f"parameters{reason}",
            )

    def _check_late_params(self) -> None:
        for name in _CLASSES:
            if getattr(self, name) is not None and self.task != "token_embed":
                message = f"{name} requires token_embed, got the task {self.task!r}"
                raise _error(name, self.task, message)
        if self.late_chunking_params is not None:
            for name in ("dimensions", *STEP_PARAMETERS, "late_interaction_params"):
                if (value := getattr(self, name)) is not None:
                    raise _error(name, value, f"Late chunking does not support {name}")


_CLASSES: dict[str, type[LateInteractionParams | LateChunkingParams]] = {
    "late_interaction_params": LateInteractionParams,
    "late_chunking_params": LateChunkingParams,
}


def _check_dimensions(dimensions: int, model: Any) -> None:
    """Allow truncated embeddings only for models that were trained for them. For other models they
    would be silently wrong."""
    name, size = model.served_model_name, model.embedding_size
    allowed = model.matryoshka_dimensions
    message = None
    if not model.is_matryoshka:
        message = (
            f"Model {name!r} does not support Matryoshka embeddings: its config.json has neither "
            "is_matryoshka nor matryoshka_dimensions; dimensions must be unset (received "
            f"dimensions={dimensions})."
        )
    elif not 1 <= dimensions <= size:
        message = f"Model {name!r} only supports dimensions in range [1, {size}], got {dimensions}."
    elif allowed is not None and dimensions not in allowed:
        message = (
            f"Model {name!r} only supports Matryoshka dimensions {list(allowed)}, got {dimensions}."
        )
    if message is not None:
        raise _error("dimensions", dimensions, message)


def _error(parameter: str, value: object, message: str) -> RequestError:
    return RequestError(message, parameter=parameter, value=value)
