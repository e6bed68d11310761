"""The models, and processes with vLLM, that are shared by all tests of a run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import free_port
from tests.helpers.pool import RankPool

# Read when vLLM and torch are imported, or when an engine starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
TIMEOUT = 600.0
"""Seconds; a test that compiles takes a tenth of it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", type=Path, help="folder that vllm_plugin.tests.models has written")
    parser.addoption("--quick", action="store_true", help="run only the tests that are marked quick")
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("--quick"):
        items[:] = [item for item in items if item.get_closest_marker("quick")]


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> Path:
    folder: Path | None = request.config.getoption("--models")
    if folder is None:
        raise pytest.UsageError("--models is missing; run: bash vllm_plugin/test.sh")
    return folder.resolve()


@pytest.fixture(scope="session")
def references(models: Path) -> Any:
    """Name of a model -> the continuation of each prompt."""
    return json.loads((models / "references.json").read_text())


def started(count: int, **variables: str) -> Iterator[Any]:
    """Yield what calls a function on as many ranks, and returns their results.

    The ranks are forks of this process, in which no engine starts: engines start threads.
    """
    from vllm.model_executor.models import registry

    from vllm_plugin.tests import engines

    # vLLM looks at a model's class in another process, which would import vLLM for each of these.
    registry._run_in_subprocess = lambda function: function()
    pool = RankPool(count, variables=os.environ | variables)

    def run(*call: Any) -> Any:
        try:
            return pool.run_within(TIMEOUT, engines.call, free_port(), *call)
        finally:
            engines.remove_shared_memory()

    yield run
    pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Two ranks of `external_launcher`."""
    yield from started(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Any]:
    """Four ranks of `external_launcher`."""
    yield from started(4)


@pytest.fixture(scope="session")
def one() -> Iterator[Any]:
    """A process that is the only rank of its engines."""
    yield from started(1)


@pytest.fixture(scope="session")
def plain() -> Iterator[Any]:
    """A process in which vLLM loads no plugins."""
    yield from started(1, VLLM_PLUGINS="")
