"""Where transformers puts the code of a directory that it opens."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def hf_modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the whole run instead of the user's: what was imported from it must stay there."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("hf_modules")))
        yield
