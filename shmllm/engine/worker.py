"""The engine's one worker, as front ends see it: what a method's name means, and where a
function finds the model.

Owns the table of methods. Must not know how a call came here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shmllm.engine.core import EngineCore
from shmllm.errors import RequestError
from shmllm.wire.rpc import RpcCall


class Worker:
    """What a function sent to the engine gets as its first argument.

    Args:
        core: of the engine.

    Attributes:
        model_runner: executes steps; `.model` is the loaded model.
        model: the same model; has `named_weights()`, `load_weights(...)`, `config`, `dtype`.
        rank, local_rank: 0, there is one worker.
        device: where the model is.
    """

    rank = local_rank = 0

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.model_runner: Any = core.runner
        self._profile: Any = None
        self._num_profiles = 0

    @property
    def model(self) -> Any:
        return self.model_runner.model

    @property
    def device(self) -> Any:
        weight, *_ = next(iter(self.model.named_weights().values()))
        return weight.device

    def run(self, call: RpcCall) -> Any:
        """Do what `call` says, between two steps; raises whatever that raises. Where it changed
        weights, they get another version, and the prefix cache is emptied: it was computed with
        the old ones."""
        self._core.settle()
        version = self.model.weights_version
        try:
            if isinstance(call.method, str):
                return self._method(call.method)(*call.args, **call.kwargs)
            return call.method(self, *call.args, **call.kwargs)
        except SystemExit as problem:
            raise RuntimeError(f"the function called exit({problem.code!r})") from problem
        finally:
            if self.model.weights_version != version:
                self._core.weights.weights_changed()

    def check_health(self) -> None:
        """Answers, which shows that the engine takes calls."""

    def list_weights(self) -> dict[str, list[Any]]:
        """[dtype, shape] of each weight, by its name in the checkpoint."""
        weights = self.model.named_weights().items()
        return {
            name: [str(views[0].dtype).removeprefix("torch."), list(views[0].shape)]
            for name, views in weights
        }

    def get_weight(self, name: str) -> Any:
        """A copy of one weight as a tensor: what is computed with, also where that is rounded."""
        weights = self.model.named_weights()
        if name not in weights:
            near = difflib.get_close_matches(name, weights, n=1, cutoff=0.0)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise RequestError(f"the model has no weight {name!r}{hint}")
        self.model.check_awake()
        return weights[name][0].clone()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> list[str]:
        """Overwrite weights, between two steps, all of them or none.

        Args:
            weights: (name in the checkpoint, tensor of its shape) pairs.

        Returns:
            The names written, sorted.

        Raises:
            RequestError: unknown names, other shapes, no floating or no finite numbers.
        """
        written = self.model.load_weights((name, _as_tensor(value)) for name, value in weights)
        return sorted(written)

    def reload_weights(self, directory: str | None = None) -> None:
        """Read the weights again, from the model's directory or from another one; an engine
        with random weights makes the same ones again."""
        self.model_runner.reload_weights(directory)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing forgotten, while requests run."""
        return self._core.reset_prefix_cache()

    def start_profile(
        self, directory: str, prefix: str = "shmllm", delay: int = 0, most: int = 0
    ) -> str:
        """Record the steps from now on with torch's profiler.

        Args:
            directory: for the trace; it has to exist.
            prefix: of the trace's name.
            delay: steps to let pass first.
            most: steps to record; 0 for all until `stop_profile`.

        Returns:
            The trace's path. It is written by `stop_profile`.

        Raises:
            RequestError: one is under way, or nothing can be written there.
        """
        from shmllm.worker.profile import ProfiledRunner

        if self._profile is not None:
            raise RequestError(f"a profile is under way already: {self._profile.path}")
        if delay < 0 or most < 0 or not prefix or "/" in prefix:
            raise RequestError(
                "a profile takes numbers of steps from 0 and a prefix without slashes, got "
                f"{delay}, {most}, {prefix!r}"
            )
        if not os.access(directory, os.W_OK | os.X_OK):
            raise RequestError(f"cannot write a profile to {directory}")
        self._num_profiles += 1
        name = f"{prefix}-{os.getpid()}-{self._num_profiles}.pt.trace.json.gz"
        self._profile = ProfiledRunner(self._core.runner, Path(directory) / name, delay, most)
        self._core.runner = self._profile
        return str(self._profile.path)

    def stop_profile(self) -> str:
        """Stop recording and write the trace. Returns its path.

        Raises:
            RequestError: there is no profile, or no step of it was recorded.
        """
        profiled = self._profile
        if profiled is None:
            raise RequestError("no profile is under way; call start_profile first")
        self._profile = None
        self._core.runner = profiled.runner
        if not profiled.finish():
            raise RequestError("the profile ended before it began: fewer steps ran than its delay")
        return str(profiled.path)

    def _method(self, name: str) -> Callable[..., Any]:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
            raise RequestError(
                f"the worker has no method {name!r}; the nearest is {near!r}. All: "
                f"{', '.join(METHODS)}"
            )
        method: Callable[..., Any] = getattr(self, name)
        return method


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


METHODS = (
    "check_health",
    "get_weight",
    "list_weights",
    "load_weights",
    "reload_weights",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
)
