"""The engine's worker: the object on which front ends run methods and functions.

An engine has one worker. This module owns the table of the worker's methods. It must not know how
calls are transmitted.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shmllm.engine.blocks_elsewhere import WeightsSource
from shmllm.engine.core import EngineCore
from shmllm.errors import RequestError, as_exception, nearest
from shmllm.params.lora import LoRARequest
from shmllm.wire.rpc import RpcCall, pickle_call


class Worker:
    """The first argument of every function that a front end runs in the engine.

    Args:
        core: the engine core.
        own_process: whether the engine has a process of its own.

    Attributes:
        model_runner: the runner, which executes steps; `.model` is the loaded model.
        model: the loaded model; it has `named_weights()`, `destinations()`, `load_weights(...)`,
            `config`, `dtype`.
        rank, local_rank: 0. Other ranks have a `parallel.rank.RankWorker`.
        device: the torch.device of the model's weights.
    """

    rank = local_rank = 0

    def __init__(self, core: EngineCore, *, own_process: bool = True) -> None:
        self._core = core
        self.model_runner: Any = core.runner
        self._profile: Any = None
        self._num_profiles = 0
        self._client = 0  # the front end whose call runs
        self._read: tuple[WeightsSource | None, int] = None, -1
        # Where `reload_weights` has read weights from last, and the version behind it.
        if core.extension:
            self._extend(core.extension, own_process)

    @property
    def model(self) -> Any:
        return self.model_runner.model

    def get_model(self) -> Any:
        """The model, as the method of vLLM's worker returns it."""
        return self.model

    @property
    def device(self) -> Any:
        return self._core.weights.device

    def _extend(self, name: str, own_process: bool) -> None:
        """Extend the worker of each rank by the class of the option `worker_extension_cls`.

        Raises:
            EngineStartError: that is not possible.
        """
        from shmllm.worker.extension import extend, join_group

        info = self._core.info
        names, *_ = self.run(RpcCall(extend, (name, info)))
        self._core.info = replace(info, extension_methods=tuple(names))
        if own_process:
            with TemporaryDirectory(prefix="shmllm-ranks-") as directory:
                self.run(RpcCall(join_group, (f"{directory}/store", info.num_processes)))

    def run(self, call: RpcCall, client: int = 0) -> Any:
        """Run a method or a function of the front end `client` between two steps.

        If the call changed weights, they get a new version, and the prefix cache is emptied,
        because it was computed with the previous weights.

        Returns:
            The result of a method; of a function, the list of the results of all ranks, by rank.

        Raises:
            Exception: any exception of the method or function.
            RuntimeError: it called `exit`, or raised what is no Exception.
            KeyboardInterrupt: it raised that, or the process was interrupted.
        """
        self._core.settle()
        self._client = client
        version = self.model.weights_version
        try:
            if isinstance(call.method, str):
                return self._method(call.method)(*call.args, **call.kwargs)
            function = call.method
            return self._core.runner.everywhere(
                lambda: function(self, *call.args, **call.kwargs), lambda: pickle_call(call)
            )
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as problem:
            raise as_exception(problem) from problem
        finally:
            if self.model.weights_version != version:
                source, version_read = self._read
                is_all = version_read == self.model.weights_version  # nothing was written behind it
                self._core.weights.weights_changed(source if is_all else None)

    def check_health(self) -> None:
        """Do nothing. The reply shows that the engine answers calls."""

    def list_weights(self) -> dict[str, list[Any]]:
        """The [dtype, shape] of each weight, by the weight's name in the checkpoint."""
        weights = self.model.named_weights().items()
        return {
            name: [str(views[0].dtype).removeprefix("torch."), list(views[0].shape)]
            for name, views in weights
        }

    def get_weight(self, name: str) -> Any:
        """A copy of one weight, by any of its names in checkpoints. Of a quantized weight, it has
        the rounded values that the model computes with.

        Raises:
            RequestError: the model has no weight of this name, or the weights are asleep.
        """
        weights = self.model.destinations()
        own = name if name in weights else self.model.known_name(name)
        if own is None or own not in weights:
            near = nearest(name, weights)
            hint = f"; the nearest name is {near}" if near else ""
            raise RequestError(f"the model has no weight {name!r}{hint}")
        self.model.check_awake()
        return self.model_runner.read_weight(own)

    def compute_weight_checksums(self) -> dict[str, str]:
        """The SHA-256 of each weight's bytes, as `get_weight` returns them, by the weight's name.

        Raises:
            RequestError: the weights are asleep.
        """
        return {name: _digest(self.get_weight(name)) for name in self.model.destinations()}

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> list[str]:
        """Overwrite weights, all of them or none.

        Args:
            weights: pairs of a name in the checkpoint and a tensor of that weight's shape.

        Returns:
            The names of the written weights, sorted.

        Raises:
            RequestError: a name is unknown, a shape differs, or values are not finite floating
                point numbers.
        """
        written = self.model.load_weights((name, _as_tensor(value)) for name, value in weights)
        return sorted(written)

    def reload_weights(self, directory: str | None = None) -> str:
        """Read the weights again, from the model's directory or from another directory. An engine
        with random weights (load_format="dummy") creates the same weights again.

        Returns:
            What was read or created, in words.
        """
        began_s = time.time()
        loaded: str = self.model_runner.reload_weights(directory)
        first = self._core.first_weights._replace(began_s=began_s)
        source = first if directory is None else WeightsSource(directory, began_s)
        self._read = source, self.model.weights_version
        return loaded

    def add_lora(
        self,
        name: str,
        number: int,
        config: Mapping[str, Any],
        tensors: Mapping[str, Any],
        load_inplace: bool = False,
    ) -> None:
        """Make an adapter known, from its tensors; see `LLM.add_lora`.

        Args:
            name, number: those of its LoRARequest.
            config: the fields of adapter_config.json.
            tensors: the tensors of adapter_model.safetensors by name.
            load_inplace: replace the contents of an adapter of this number.

        Raises:
            RequestError: it does not suit the model, the number is in use, or another front end
                is changing the adapter.
        """
        self._core.adapters.check_free(self._client, number)
        lora = LoRARequest(name, number, load_inplace=load_inplace)
        given = {key: _as_tensor(value) for key, value in tensors.items()}
        self._core.adapters.add_made(lora, lambda: self._core.runner.make_lora(config, given))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix.

        Returns:
            False, without any change, if requests are running.
        """
        return self._core.reset_prefix_cache()

    def start_profile(
        self, directory: str, prefix: str = "shmllm", delay: int = 0, most: int = 0
    ) -> str:
        """Record steps with torch's profiler.

        Args:
            directory: the directory of the trace; it is made if it does not exist.
            prefix: the beginning of the trace's file name.
            delay: the number of steps before the recording begins.
            most: the largest number of steps to record; 0 means all until `stop_profile`.

        Returns:
            The path of the trace, which `stop_profile` writes. Other ranks write theirs beside it:
            "-rank1", "-rank2" ... stand behind the names.

        Raises:
            RequestError: a profile is in progress, an argument is not valid, or the directory
                cannot be written to.
        """
        from shmllm.worker.profile import SUFFIX, ProfiledRunner

        if self._profile is not None:
            raise RequestError(f"a profile is under way already: {self._profile.path}")
        if delay < 0 or most < 0 or not prefix or "/" in prefix:
            raise RequestError(
                "a profile takes numbers of steps from 0 and a prefix without slashes, got "
                f"{delay}, {most}, {prefix!r}"
            )
        _make_writable(directory)
        self._num_profiles += 1
        name = f"{prefix}-{os.getpid()}-{self._num_profiles}{SUFFIX}"
        self._profile = ProfiledRunner(self._core.runner, Path(directory) / name, delay, most)
        self._core.runner = self._profile
        return str(self._profile.path)

    def stop_profile(self) -> str:
        """Stop recording and write the trace. Returns its path.

        Raises:
            RequestError: no profile is in progress, or it recorded no step.
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
            known = [*METHODS, *self._core.info.extension_methods]
            raise RequestError(
                f"the worker has no method {name!r}; the nearest is {nearest(name, known)!r}. "
                f"All: {', '.join(known)}"
            )
        method: Callable[..., Any] = getattr(self, name)
        return method


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _digest(weight: Any) -> str:
    import torch

    return hashlib.sha256(weight.contiguous().view(-1).view(torch.uint8).cpu().numpy()).hexdigest()


METHODS = (
    "add_lora",
    "check_health",
    "compute_weight_checksums",
    "get_weight",
    "list_weights",
    "load_weights",
    "reload_weights",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
)


def _make_writable(directory: str) -> None:
    """Make a directory for profiles, unless it exists.

    Raises:
        RequestError: it cannot be made or written to.
    """
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot write a profile to {directory}: {error}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RequestError(f"cannot write a profile to {directory}")
