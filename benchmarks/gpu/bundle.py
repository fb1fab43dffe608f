"""`python -m benchmarks gpu-bundle`: what a machine without a network lacks, in one folder.

BUNDLE/wheels has DeepSpeed and what it imports, for Python 3.12; BUNDLE/corpus a small corpus with
its tokenizer. A run of the steps unpacks the wheels into OUT/site, since pip may be missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

from benchmarks.gpu.processes import run_process
from benchmarks.gpu.steps import ROOT
from benchmarks.texts import standard_library, write_jsonl
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.manifest import MANIFEST_NAME
from foundation.cli import check_output_directory
from foundation.errors import UserError

WHEELS, CORPUS, SITE = "wheels", "corpus", "site"
# DeepSpeed publishes no wheel. Its dependencies that are not listed are usually installed.
BUILT = ("deepspeed",)
DOWNLOADED = ("annotated-types", "hjson", "pydantic", "pydantic-core", "typing-inspection")
OPTIONAL = ("fla-core==0.6.0",)  # kernels of deltanets; requirements.lock does not have it
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LARGEST_BUNDLE = 40 << 20  # bytes
VOCABULARY = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--corpus", type=Path, help="corpus to carry (default: Python's library)")
    parser.add_argument("--python", default="3.12", help="Python of the machine (default 3.12)")


def run(arguments: argparse.Namespace) -> int:
    """Write the bundle; 0 if it is complete and small enough."""
    out = arguments.out.absolute()
    check_output_directory("--out", out)
    fetch_wheels(out / WHEELS, arguments.python)
    if arguments.corpus:
        shutil.copytree(arguments.corpus, out / CORPUS, dirs_exist_ok=True)
    elif not (out / CORPUS / "train" / MANIFEST_NAME).exists():
        text = out.with_name(f"{out.name}-text") / "text.jsonl"
        print(write_jsonl(text, standard_library()))
        build_small_corpus(text, out / CORPUS, TokenizerConfig(kind="bpe", vocab_size=VOCABULARY))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LARGEST_BUNDLE:
        limit = LARGEST_BUNDLE >> 20
        raise UserError(f"{out} has {size:,} bytes, expected at most {limit} MiB; use less text")
    return 0


def fetch_wheels(directory: Path, python: str) -> None:
    """Fetch the wheels of the lock's versions for a Python and Linux on x86_64."""
    pins, pip = locked_versions(ROOT / "requirements.lock"), [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    names = [*(f"{name}=={pins[name]}" for name in DOWNLOADED), *OPTIONAL]
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    where = ["--only-binary=:all:", "--python-version", python, *platforms, "-d", str(directory)]
    subprocess.run([*pip, "download", *quiet, *where, *names], check=True)
    built = [f"{name}=={pins[name]}" for name in BUILT]
    # DeepSpeed's build looks for an accelerator; these variables let it compile no operators.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    command = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(directory), *built]
    subprocess.run(command, check=True, env=environment)


def locked_versions(lock: Path) -> dict[str, str]:
    """Return name -> version of every package of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", lock.read_text(), re.MULTILINE))


def install_wheels(bundle: Path, out: Path) -> None:
    """Unpack the bundle's wheels and let this Python, and those it starts, find them first."""
    wheels = sorted((bundle / WHEELS).glob("*.whl"))
    if not wheels:
        raise UserError(f"{bundle / WHEELS}: found no wheels; run 'make gpu-bundle'")
    site = out / SITE
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    sys.path.insert(0, str(site))
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def build_small_corpus(text: Path, output: Path, tokenizer: TokenizerConfig) -> int:
    """Build a corpus of JSONL with a training and a validation split; returns 0."""
    from data_pipeline.builder.build_corpus import build_corpus

    config = CorpusConfig(
        input=(text,), output=output, validation_fraction=0.05, threads=1, tokenizer=tokenizer,
        shard_format="webdataset", shard_bytes=4 << 20,
    )  # fmt: skip
    build_corpus(config)
    return 0


def build_dry_corpus(output: Path) -> Path:
    """Build a corpus of bytes for a dry run, unless it is there; returns `output`."""
    if not (output / "train" / MANIFEST_NAME).exists():
        text = output.with_name("text.jsonl")
        text.write_text(
            "".join(f'{{"id": "d{n}", "text": "{f"line {n} of it. " * 40}"}}\n' for n in range(60))
        )
        # In a process of its own, because a build imports much that no step needs.
        build = partial(build_small_corpus, text, output, TokenizerConfig(kind="bytes"))
        log = output.with_name("corpus.log")
        if run_process(build, log, None, is_dry=True, absent=()):
            raise UserError(f"the corpus was not built; see {log}")
    return output
