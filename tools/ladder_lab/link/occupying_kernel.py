# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-decorators=false
"""The kernel of a collective that is emulated on one GPU; this file needs triton.

NCCL's blocks have about 600 threads with 96 registers each, so that nothing else fits on the multiprocessors that they
take. A block here takes all registers of its multiprocessor, because its threads move 32 numbers each at once.
"""

import triton
import triton.language as tl
from torch import Tensor

WARPS = 32


@triton.jit
def _nanoseconds():
    # Not tl.extra.cuda.globaltimer, which is pure: the compiler would read it once, before the loop.
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["slot"])
def occupy_kernel(message, scratch, count, durations, launches, slot, BLOCK: tl.constexpr):
    """Move the message to scratch memory and back until the duration in the slot is over; count the launch there."""
    # Each warp reads the clock for itself, so there must be no barrier.
    began = _nanoseconds()
    duration = tl.load(durations + slot)
    program = tl.program_id(0)
    if program == 0:
        tl.atomic_add(launches + slot, 1, sem="relaxed")
    slots = scratch + program * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.cdiv(count, BLOCK)
    block = program
    # Few multiprocessors may be too slow to move all of it in time.
    while (block < blocks) & (_nanoseconds() - began < duration):
        elements = block * BLOCK + tl.arange(0, BLOCK)
        inside = elements < count
        tl.store(slots, tl.load(message + elements, mask=inside, volatile=True), mask=inside)
        tl.store(message + elements, tl.load(slots, mask=inside, volatile=True), mask=inside)
        block += tl.num_programs(0)
        # The traffic is spread evenly over the duration.
        due = duration * tl.minimum(block, blocks) // blocks
        while _nanoseconds() - began < due:
            pass
    while _nanoseconds() - began < duration:
        pass


def occupy(message: Tensor, scratch: Tensor, durations: Tensor, launches: Tensor, slot: int) -> None:
    """Launch the kernel on the current stream; see `occupied.Occupy`."""
    blocks, block_numbers = scratch.shape
    arguments = message, scratch, message.numel(), durations, launches, slot
    occupy_kernel[(blocks,)](*arguments, BLOCK=block_numbers, num_warps=WARPS)
