from pathlib import Path

import pytest

from tests.helpers.corpora import make_tiny_corpus


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with train and validation splits, small enough to be made once per session."""
    return make_tiny_corpus(tmp_path_factory.mktemp("corpus"))
