"""The lock files: every package has hashes, and users get nothing that only tests need."""

import re

import pytest

from tests.helpers.checkout import ROOT

REQUIREMENT = re.compile(r"^([a-z0-9._-]+)==(\S+)(?: ; ([^\\]+?))? ?\\?$")


def packages(name: str) -> dict[tuple[str, str, str], list[str]]:
    """The hashes of each (package, version, marker) of a lock file."""
    found: dict[tuple[str, str, str], list[str]] = {}
    hashes: list[str] = []
    for line in (ROOT / name).read_text().splitlines():
        if match := REQUIREMENT.match(line):
            hashes = found.setdefault((match[1], match[2], match[3] or ""), [])
        else:
            hashes.append(line.strip(" \\"))
    return found


def test_what_installs_has_hashes_of_all_that_it_installs():
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^\$\(STAMP\).*?# Universal", makefile, re.M | re.S)
    hybrids = re.search(r"^venv-hybrids:.*?\n\n", makefile, re.M | re.S)
    assert recipe is not None
    assert hybrids is not None
    installs = re.findall(r"pip install .*", recipe[0] + hybrids[0])
    locked = [
        re.search(r"--require-hashes (?:--target \S+ )?-r (\S+\.lock)$", line) for line in installs
    ]
    others = [line for line, lock in zip(installs, locked, strict=True) if not lock]
    assert [line.split()[-2:] for line in others] == [["-e", "."]]
    assert {lock[1] for lock in locked if lock} == {path.name for path in ROOT.glob("*.lock")}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.lock")), ids=lambda path: path.name)
def test_every_locked_package_has_hashes(path):
    assert packages(path.name)
    for package, hashes in packages(path.name).items():
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), package


def test_users_get_no_package_that_only_tests_need():
    users = {package for package, _, _ in packages("requirements.lock")}
    assert {"torch", "deepspeed", "mosaicml-streaming", "pyarrow"} <= users
    assert not users & {"pytest", "moto", "flask", "docker", "hypothesis", "ruff", "pyright"}


def test_tests_run_with_what_users_get():
    tests = packages("requirements-dev.lock").keys()
    for name, version, marker in packages("requirements.lock"):
        # Without a marker it is installed everywhere, so also where users have it.
        assert tests & {(name, version, marker), (name, version, "")}, name
