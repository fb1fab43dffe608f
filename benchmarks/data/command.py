"""`python -m benchmarks data`: its benchmarks, each at its full size."""

from __future__ import annotations

import argparse

from benchmarks.data.encoding import EncodingSize, encoding_costs
from benchmarks.data.libraries import LibrariesSize, library_costs
from benchmarks.data.reading import ReadingSize, reading_costs
from benchmarks.data.scale import ScaleSize, scale_costs
from benchmarks.data.storage import StorageSize, storage_costs
from benchmarks.measure import Section, add_report_arguments, machine, run_benchmarks

BENCHMARKS = (
    Section("reading", lambda directory: reading_costs(directory, ReadingSize())),
    Section("scale", lambda directory: scale_costs(directory, ScaleSize())),
    Section("storage", lambda directory: storage_costs(directory, StorageSize())),
    Section("encoding", lambda directory: encoding_costs(directory, EncodingSize())),
    Section("libraries", lambda directory: library_costs(directory, LibrariesSize())),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_report_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if every goal is reached within its tolerance."""
    return run_benchmarks(arguments, machine(threads=1), BENCHMARKS)
