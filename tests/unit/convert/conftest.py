"""The folder in which transformers caches the code of directories."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def hf_modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use one folder for the whole run instead of the user's: imported modules must stay in it."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("hf_modules")))
        yield
