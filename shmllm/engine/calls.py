"""The methods that a front end can call on an engine: one function for each `Method`.

The engine process and the engine in the caller's own process share this table. Arguments and
results are JSON values. This module must not know how a call was transmitted.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

from shmllm.core.pausing import PauseMode
from shmllm.engine.core import EngineCore
from shmllm.engine.sleep import SleepResult, level_of, parts_of
from shmllm.errors import RequestError, as_exception
from shmllm.params.lora import LoRARequest
from shmllm.wire.messages import Call, Method, Reply


def _reset_prefix_cache(core: EngineCore, client: int, argument: Any) -> bool:
    asked = argument if isinstance(argument, dict) else {}
    return core.reset_prefix_cache(
        preempt_running=asked.get("running") is True, clear_elsewhere=asked.get("shared") is True
    )


def _reset_encoder_cache(core: EngineCore, client: int, argument: Any) -> None:
    core.scheduler.encoder_cache.reset()


def _pause(core: EngineCore, client: int, argument: Any) -> int:
    return core.pause(client, PauseMode.of(argument))


def _resume(core: EngineCore, client: int, argument: Any) -> bool:
    return core.resume(client)


def _trace(core: EngineCore, client: int, argument: Any) -> bool:
    """The engine process handles this call itself; see `engine.tracing`."""
    raise RequestError("an engine in the caller's own process has no name and cannot be traced")


def _sleep(core: EngineCore, client: int, argument: Any) -> Any:
    level, mode = level_of(argument["level"]), PauseMode.of(argument["mode"])
    result = core.sleep(client, level, mode)
    return result if isinstance(result, int) else _sleep_json(result)


def _wake_up(core: EngineCore, client: int, argument: Any) -> Any:
    return _sleep_json(core.sleeper.wake(client, parts_of(argument)))


def _sleep_json(result: SleepResult) -> dict[str, Any]:
    return {"report": result.report.to_json(), "warning": result.warning}


def _start_weights(core: EngineCore, client: int, argument: Any) -> None:
    core.weights.start(client)


def _check_weights(core: EngineCore, client: int, argument: Any) -> None:
    core.weights.check(client)


def _lend_memory(core: EngineCore, client: int, argument: Any) -> None:
    core.weights.lend(client, argument["handle"], argument["num_bytes"])


def _stage_lent(core: EngineCore, client: int, argument: Any) -> None:
    core.weights.stage_lent(client, argument)


def _finish_weights(core: EngineCore, client: int, argument: Any) -> list[str]:
    core.transfer.check_arrived(client)
    return core.weights.finish(client, **argument)


def _abandon_weights(core: EngineCore, client: int, argument: Any) -> None:
    core.transfer.abandon(client)
    core.weights.abandon(client)


def _get_weight_version(core: EngineCore, client: int, argument: Any) -> int | str:
    return core.weights.version


def _set_weight_version(core: EngineCore, client: int, argument: Any) -> None:
    core.weights.set_version(argument)


def _open_transfer(core: EngineCore, client: int, argument: Any) -> None:
    core.transfer.open(client, argument["init_info"], argument["token"])


def _receive_weights(core: EngineCore, client: int, argument: Any) -> None:
    core.transfer.receive(client, argument["update_info"], argument["token"])


def _transfer_progress(core: EngineCore, client: int, argument: Any) -> int:
    return core.transfer.progress(client, argument)


def _close_transfer(core: EngineCore, client: int, argument: Any) -> None:
    core.transfer.shut_down()


def _add_lora(core: EngineCore, client: int, argument: Any) -> bool:
    lora = LoRARequest(**argument)
    core.adapters.check_free(client, lora.lora_int_id)
    return core.adapters.add(lora)


def _remove_lora(core: EngineCore, client: int, argument: Any) -> bool:
    core.adapters.check_free(client, argument)
    return core.adapters.remove(argument)


def _list_loras(core: EngineCore, client: int, argument: Any) -> list[int]:
    return core.adapters.ids


def _pin_lora(core: EngineCore, client: int, argument: Any) -> bool:
    core.adapters.check_free(client, argument)
    return core.adapters.pin(argument)


def _hold_lora(core: EngineCore, client: int, argument: Any) -> bool:
    return core.adapters.hold(client, argument)


def _release_lora(core: EngineCore, client: int, argument: Any) -> None:
    core.adapters.release(client, restore=argument is True)


_METHODS: dict[Method, Callable[[EngineCore, int, Any], Any]] = {
    Method.RESET_PREFIX_CACHE: _reset_prefix_cache,
    Method.RESET_ENCODER_CACHE: _reset_encoder_cache,
    Method.PAUSE: _pause,
    Method.RESUME: _resume,
    Method.TRACE: _trace,
    Method.SLEEP: _sleep,
    Method.WAKE_UP: _wake_up,
    Method.START_WEIGHTS: _start_weights,
    Method.CHECK_WEIGHTS: _check_weights,
    Method.FINISH_WEIGHTS: _finish_weights,
    Method.ABANDON_WEIGHTS: _abandon_weights,
    Method.GET_WEIGHT_VERSION: _get_weight_version,
    Method.SET_WEIGHT_VERSION: _set_weight_version,
    Method.OPEN_TRANSFER: _open_transfer,
    Method.RECEIVE_WEIGHTS: _receive_weights,
    Method.TRANSFER_PROGRESS: _transfer_progress,
    Method.CLOSE_TRANSFER: _close_transfer,
    Method.LEND_MEMORY: _lend_memory,
    Method.STAGE_LENT: _stage_lent,
    Method.ADD_LORA: _add_lora,
    Method.REMOVE_LORA: _remove_lora,
    Method.LIST_LORAS: _list_loras,
    Method.PIN_LORA: _pin_lora,
    Method.HOLD_LORA: _hold_lora,
    Method.RELEASE_LORA: _release_lora,
}


_FAILURES_TO_RECORD = (
    Method.CHECK_WEIGHTS,
    Method.FINISH_WEIGHTS,
    Method.STAGE_LENT,
    Method.TRANSFER_PROGRESS,
)
"""The methods whose refusals belong into the error log: the weights that were sent are lost."""


def run_method(core: EngineCore, client: int, method: Method, argument: Any) -> Any:
    """Run a method for the front end `client`, between two steps.

    Raises:
        Exception: any exception of the method.
    """
    core.settle()
    return _METHODS[method](core, client, argument)


def reply_to(core: EngineCore, client: int, call: Call) -> Reply:
    """Answer a CALL."""
    return reply_with(
        call.number,
        lambda: json.dumps(run_method(core, client, call.method, json.loads(call.json))),
    )


def reply_with(number: int, work: Callable[[], str]) -> Reply:
    """The Reply with the JSON text that `work` returns.

    If `work` raises an exception, the Reply carries that: a failed call must not end the engine.
    A signal does not raise KeyboardInterrupt here.
    """
    try:
        return Reply(number, True, work())
    except (Exception, KeyboardInterrupt) as raised:
        problem = as_exception(raised)
        is_expected = isinstance(problem, RequestError)
        kind = type(problem).__name__
        trace = "" if is_expected else traceback.format_exc()
        return Reply(number, False, json.dumps([kind, str(problem), trace]))


def failure_of(reply: Reply, method: Method | None = None) -> str:
    """What failed in a call, in one line, for the error log.

    Args:
        reply: the reply to the call.
        method: the method; None for a call of the worker.

    Returns:
        "" if the call succeeded or was refused, which concerns its caller only.
    """
    if reply.ok:
        return ""
    kind, message, trace = json.loads(reply.json)
    if not trace and method not in _FAILURES_TO_RECORD:
        return ""
    return f"{method.name if method else 'a call of the worker'} failed: {kind}: {message}"
