"""What the kernel that asks for weights ahead must request, wherever it runs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from shmllm_kernels.gpu.weights_ahead import (
    ALIGNMENT,
    REQUEST_BYTES,
    THREADS,
    WeightsAhead,
    requests_of,
)

REQUEST = REQUEST_BYTES.value
MOST = 2**30


@triton.jit
def _store_requests(addresses_ptr, sizes_ptr, ahead, num_programs, THREADS: tl.constexpr):
    program = tl.program_id(0)
    address, size = requests_of(ahead, program, num_programs)
    place = program * THREADS + tl.arange(0, THREADS)
    tl.store(addresses_ptr + place, address)
    tl.store(sizes_ptr + place, size)


def requests(ahead, device, programs, num_programs=None):
    """The addresses and sizes of what some programs request, [programs, THREADS]."""
    sizes = torch.empty(programs, THREADS.value, dtype=torch.int32, device=device)
    addresses = torch.empty(programs, THREADS.value, dtype=torch.int64, device=device)
    _store_requests[(programs,)](
        addresses, sizes, ahead.as_arguments(), num_programs or programs, THREADS=THREADS.value
    )
    return addresses.cpu(), sizes.cpu()


class WeightsAheadConformance:
    @pytest.mark.parametrize("programs", [1, 3, 64])
    @pytest.mark.parametrize("most_bytes", [0, 100, 5000, 50_000, MOST])
    def test_requests_cover_what_is_read_next(self, device, programs, most_bytes):
        output = torch.empty(40, 100, dtype=torch.float16, device=device)
        gate_up = torch.empty(300, 40, dtype=torch.float16, device=device)
        ahead = WeightsAhead.of(most_bytes, output, gate_up, is_gated=True)
        wanted = set()
        for part, num_bytes in ahead.parts:
            assert num_bytes % ALIGNMENT == 0
            wanted |= set(range(part.data_ptr(), part.data_ptr() + num_bytes))
        assert sum(num_bytes for _, num_bytes in ahead.parts) == len(wanted) <= most_bytes
        addresses, sizes = requests(ahead, device, programs)
        found = [
            byte
            for address, size in zip(addresses.flatten(), sizes.flatten(), strict=True)
            for byte in range(int(address), int(address + size))
        ]
        assert ((addresses % ALIGNMENT == 0) & (sizes % ALIGNMENT == 0)).all()
        assert (sizes <= REQUEST).all()
        assert len(found) == len(wanted), "a byte is requested twice"
        assert set(found) == wanted

    def test_the_output_comes_first_then_the_beginning_of_both_halves(self, device):
        output = torch.empty(64, 64, dtype=torch.float16, device=device)
        gate_up = torch.empty(256, 64, dtype=torch.float16, device=device)
        of = WeightsAhead.of
        [first, gates, ups] = of(output.nbytes + 1024, output, gate_up, is_gated=True).parts
        assert (first[0].data_ptr(), first[1]) == (output.data_ptr(), output.nbytes)
        assert (gates[0].data_ptr(), gates[1]) == (gate_up.data_ptr(), 512)
        assert (ups[0].data_ptr(), ups[1]) == (gate_up[128:].data_ptr(), 512)
        assert [size for _, size in of(4096, output, gate_up, True).parts] == [4096, 0, 0]
        assert [size for _, size in of(MOST, output, None, False).parts] == [output.nbytes, 0, 0]
        [_, whole, _] = of(MOST, output, gate_up, is_gated=False).parts
        assert whole[1] == gate_up.nbytes
        [behind, *_] = of(MOST, output.flatten()[1:], None, False).parts
        assert behind[1] == 0, "it begins at no multiple"

    def test_what_programs_cannot_request_is_left_out(self, device):
        large = torch.empty(2 * REQUEST * THREADS.value, dtype=torch.int8, device=device)
        ahead = WeightsAhead.of(MOST, large, None, is_gated=False)
        addresses, sizes = requests(ahead, device, 1)
        assert (sizes == REQUEST).all()
        assert (addresses[0] == large.data_ptr() + torch.arange(THREADS.value) * REQUEST).all()

    def test_of_many_programs_the_first_ones_ask(self, device):
        """The threads of all could ask for 512 GiB, more than an int32 counts."""
        large = torch.empty(2 * REQUEST, dtype=torch.int8, device=device)
        ahead = WeightsAhead.of(MOST, large, None, is_gated=False)
        addresses, sizes = requests(ahead, device, 2, num_programs=2**20)
        assert sizes[:, 0].tolist() == [REQUEST] * 2
        assert addresses[:, 0].tolist() == [large.data_ptr(), large.data_ptr() + REQUEST]
        assert not sizes[:, 1:].any()
