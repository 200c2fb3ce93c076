"""Functions that are sent to the engine's worker."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmllm.wire.rpc import RpcCall, pickle_call


def name_of(worker: Any) -> str:
    """A function of a module that no engine can import."""
    return __name__


def test_several_threads_pickle_functions_of_one_module() -> None:
    """cloudpickle has one registry of modules for all threads, which refuses a module that another
    thread has taken out."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            pickles = [*threads.map(lambda _: pickle_call(RpcCall(name_of)), range(2000))]
    finally:
        sys.setswitchinterval(interval)
    assert {pickle.loads(each)[0](None) for each in pickles} == {__name__}
