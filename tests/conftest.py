from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.checkout import empty_working_directory, unchanged_checkout
from tests.helpers.stores import CREDENTIALS, make_bucket, s3_server

if TYPE_CHECKING:
    from pretrain.distributed.world import World

# One thread per process: workers and ranks share the cores, and threads that wait for each other
# cost many times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
THREADS = int(os.environ["OMP_NUM_THREADS"])
# Torch finds compiled kernels by a key without the instruction set; those of another crash.
ISA = os.environ.get("ATEN_CPU_CAPABILITY", "native")
KERNELS = f"{tempfile.gettempdir()}/xl-pretrain-kernels-{os.getuid()}-{ISA}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", KERNELS)
# A shell ignores SIGINT in its background jobs, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup does
# Nothing is looked up on the web, and the code of exports is copied to where it is removed.
os.environ["HF_HUB_OFFLINE"] = "1"
HUGGINGFACE_MODULES = tempfile.TemporaryDirectory(prefix="huggingface-modules-")
os.environ["HF_MODULES_CACHE"] = HUGGINGFACE_MODULES.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # late: most selections of tests need no torch in the collecting process

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _fixtures_start_in_an_empty_directory() -> Iterator[None]:
    """Let no test see what a checkout holds besides: runs, corpora, files named as a test's own."""
    with unchanged_checkout(), empty_working_directory() as here:
        yield
        assert not os.listdir(here), (
            "a fixture wrote to the working directory; use tmp_path_factory"
        )


@pytest.fixture(autouse=True)
def _each_test_starts_in_an_empty_directory() -> Iterator[None]:
    with empty_working_directory():
        yield


@pytest.fixture(autouse=True)
def _logging_ends_with_the_test() -> Iterator[None]:
    """Undo what a command of the test set up: other tests count the lines on stderr."""
    root, level, showwarning = logging.getLogger(), logging.getLogger().level, warnings.showwarning
    before = set(root.handlers)
    yield
    for handler in set(root.handlers) - before:
        if type(handler).__module__.startswith("pretrain."):
            root.removeHandler(handler)
    root.setLevel(level)
    warnings.showwarning = showwarning


@pytest.fixture(autouse=True)
def _threads_end_with_the_test() -> Iterator[None]:
    """Undo what a command of the test set: another number of threads rounds differently."""
    yield
    if torch := sys.modules.get("torch"):
        if torch.get_num_threads() != THREADS:
            torch.set_num_threads(THREADS)
        torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as the only rank."""
    from pretrain.distributed.world import destroy_process_group, init_world  # late: it takes torch

    yield init_world()
    destroy_process_group()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A server that speaks S3, on loopback."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """The URL of a new bucket of it, which this process and those it starts can reach."""
    for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    return make_bucket(s3_endpoint, f"test-{abs(hash(request.node.nodeid)):x}")
