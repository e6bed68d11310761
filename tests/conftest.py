"""What every test gets: one thread, no network hub, an extensions folder of its own, signals that are heard, --slow."""

import gc
import itertools
import os
import shutil
import signal
import tempfile
import time

import pytest

from tests.helpers.patience import be_patient

# Read when torch, and when transformers, are imported: too late inside of a fixture.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# transformers imports the code of exported directories from here. Python keeps the path of an imported package, so all
# tests of a process share one folder.
HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")
# DeepSpeed looks for an accelerator when it is imported.
os.environ["DS_ACCELERATOR"] = "cpu"

# Under nohup, or behind an & of a script, they are ignored, and so would be by the programs that tests send them to.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

TEST_NUMBERS = itertools.count()

# While modules are imported, there is a growing number of objects to look at and no garbage.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow as well")
    parser.addoption("--patience", type=float, default=1.0, help="factor of all time limits")
    parser.addoption("--until", type=float, help="skip what has not begun by then (seconds of the epoch)")


def pytest_configure(config: pytest.Config) -> None:
    be_patient(config.getoption("--patience"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("the time for this test run is over")


def pytest_unconfigure() -> None:
    shutil.rmtree(HF_MODULES_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def own_torch_extensions_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that was killed leaves a lock in this folder on which every later user of it waits for ever."""
    folder = tmp_path_factory.getbasetemp() / "torch_extensions" / str(next(TEST_NUMBERS))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
