"""The two kernels of an emulated link on a GPU. This file needs triton, which comes with torch for CUDA.

Times come from the device's global timer, in nanoseconds; on an H100 it advances every 32 ns.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

THREADS_OF_A_WARP = 32
WARPS = 32
"""1024 threads a program: half of a multiprocessor, which seldom leaves room for a block of a large product."""
BLOCK = 4 * WARPS * THREADS_OF_A_WARP
"""Words that a program moves at once: 16 bytes a thread."""


@triton.jit(do_not_specialize=["slot"])
def _stamp(launched, slot):  # type: ignore[no-untyped-def]
    tl.store(launched + slot, globaltimer())


@triton.jit(do_not_specialize=["slot", "before", "moved", "wire_ns"])  # type: ignore[untyped-decorator]
def _carry(  # type: ignore[no-untyped-def]
    launched, ends, slot, before, source, sink, words, moved, wire_ns, SERIAL: tl.constexpr, BLOCK: tl.constexpr
):
    begin = tl.load(launched + slot)
    if SERIAL:
        begin = tl.maximum(begin, tl.load(ends + before))
    first = tl.program_id(0) * BLOCK
    for position in range(first, moved, tl.num_programs(0) * BLOCK):
        # The bytes spread over the wire's time, as those of a real reduce do.
        due = begin + wire_ns.to(tl.int64) * position // moved
        while globaltimer() < due:
            pass
        offsets = position + tl.arange(0, BLOCK)
        values = tl.load(source + offsets % words, mask=offsets < moved)
        tl.store(sink + offsets % words, values, mask=offsets < moved)
    while globaltimer() < begin + wire_ns:
        pass
    if tl.program_id(0) == 0:
        tl.store(ends + slot, begin + wire_ns)


class StandInKernels:
    """Launches the kernels on the current stream; implements `cuda_link.Kernels`."""

    def stamp(self, launched: Tensor, slot: int) -> None:
        """Store the time in launched[slot]."""
        _stamp[(1,)](launched, slot, num_warps=1)

    def carry(
        self,
        launched: Tensor,
        ends: Tensor,
        slot: int,
        before: int,
        scratch: Tensor,
        num_bytes: int,
        wire_ns: int,
        *,
        serial: bool,
        sms: int,
    ) -> None:
        """Occupy `sms` multiprocessors until launched[slot] + wire_ns; see `cuda_link.Kernels.carry`."""
        source, sink = scratch.unbind(0)
        _carry[(sms,)](
            launched,
            ends,
            slot,
            before,
            source,
            sink,
            source.numel(),
            num_bytes // 4,
            wire_ns,
            SERIAL=serial,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
