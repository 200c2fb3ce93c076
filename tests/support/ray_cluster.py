"""A Ray cluster of one machine for several programs, one after another.

    python ray_cluster.py DIRECTORY

Prints the cluster's address; the cluster ends when stdin does. DIRECTORY takes Ray's sockets, so
its path must be short.
"""

from __future__ import annotations

import sys

import ray

NUM_CPUS = 3
"""One for the actor of an engine, two for what reads, filters and writes rows."""
OBJECT_STORE_BYTES = 200 * 2**20


def main() -> None:
    context = ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=sys.argv[1],
        log_to_driver=False,
    )
    print(context.address_info["address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
