"""Fixtures of the tests that need several processes."""

from collections.abc import Iterator

import pytest

from tests.helpers.pool import GlooPools, import_for_ranks


@pytest.fixture(scope="session")
def gloo_pools() -> Iterator[GlooPools]:
    """Every pool of the run: `gloo_pools(2).run(function, ...)` runs a case on two ranks."""
    import_for_ranks()
    pools = GlooPools()
    yield pools
    pools.close()
