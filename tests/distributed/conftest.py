"""Fixtures of the tests that need several processes."""

import importlib
from collections.abc import Iterator

import pytest

from megatron_ladder.engine.build import import_deepspeed
from tests.helpers.pool import GlooPools

PRELOADED = ("deepspeed.runtime.pipe.engine", "deepspeed.module_inject", "torch._inductor.compile_fx")
"""Imported once for all ranks, which are forks of the test process; each would need seconds for it."""


@pytest.fixture(scope="session")
def gloo_pools() -> Iterator[GlooPools]:
    """Every pool of the run: `gloo_pools(2).run(function, ...)` runs a case on two ranks."""
    import_deepspeed()
    for module in PRELOADED:
        importlib.import_module(module)
    pools = GlooPools()
    yield pools
    pools.close()
