"""KV blocks that engines share by copies, on the fake GPU."""

from __future__ import annotations

from conformance.gpu_shared_kv import SharedKVConformance, engines, region

__all__ = ["engines", "region"]


class TestSharedKV(SharedKVConformance):
    pass
