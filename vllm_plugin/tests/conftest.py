"""The models, and processes with vLLM, that are shared by all tests of a run."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read when vLLM and torch are imported, or when an engine starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", type=Path, help="folder that vllm_plugin.tests.models has written")
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


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


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[str, Any]]:
    """Two ranks under `ranks`, and a process without plugins under `plain`.

    Both are forks of this process from before its own first engine, because engines start threads.
    """
    from vllm.model_executor.models import registry

    from vllm_plugin.tests import engines  # noqa: F401 (imports vLLM for all of them)
    from vllm_plugin.tests.workers import Workers

    # vLLM looks at a model's class in another process, which would import vLLM for each of these.
    registry._run_in_subprocess = lambda function: function()
    # Collecting garbage would otherwise write to, and so copy, the pages that the forks share.
    gc.collect()
    gc.freeze()
    workers = {"ranks": Workers(2, {}), "plain": Workers(1, {"VLLM_PLUGINS": ""})}
    yield workers
    for each in workers.values():
        each.close()


@pytest.fixture(scope="session")
def ranks(processes: dict[str, Any]) -> Any:
    """Two ranks of `external_launcher`."""
    return processes["ranks"]


@pytest.fixture(scope="session")
def plain(processes: dict[str, Any]) -> Any:
    """A process in which vLLM loads no plugins."""
    return processes["plain"]


@pytest.fixture(scope="session")
def here(processes: dict[str, Any]) -> Any:
    """Call functions in this process, which is the only rank of its engines, after the others have been forked."""

    def call(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    return call
