"""All parts of a build at the same time, a process for each; they end with the command that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from data_pipeline.builder.build_corpus import (
    BuildResult,
    list_all_sources,
    recipe_of,
    tokenizer_plan,
    youngest,
)
from data_pipeline.builder.duplicates import read_hashes, write_copies
from data_pipeline.builder.journal import BuildJournal, claimed_output, is_finished
from data_pipeline.builder.parts import (
    build_part,
    check_output,
    hashes_path,
    list_hashes,
    merge_parts,
    shared_directory,
)
from data_pipeline.builder.train_tokenizer import needs_training, prepare_tokenizer
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.errors import DataError, UserError
from data_pipeline.progress import Reading, Report, joined

Task = Callable[
    [CorpusConfig, int, int, Report], None
]  # what is done for a part: its number, and how many there are
COPIES_SUFFIX = ".copies"  # of the list of a part's hashes that came before


def build_in_processes(
    config: CorpusConfig, processes: int, report: Report = lambda what: None
) -> BuildResult:
    """Build as many parts as processes at the same time and merge them; the same call goes on after a kill.

    There are never more parts than input files.
    """
    sources = list_all_sources(config)
    num_parts = min(processes, len(sources))
    if is_finished(config.output):
        return merge_parts(config, num_parts)
    check_output(config, sources, num_parts)
    shared = shared_directory(config, num_parts)
    with claimed_output(shared):
        BuildJournal(
            shared, recipe_of(config, sources), youngest(sources)
        )  # refuses parts of other text or settings
        parts = replace(
            config, threads=max(1, (config.threads or os.cpu_count() or 1) // num_parts)
        )
        if needs_training(config.tokenizer):
            directory = shared / TOKENIZER_DIRECTORY
            report(f"tokenizer: {tokenizer_plan(config)}")
            prepare_tokenizer(
                directory, [source for split, source in sources if split != "validation"], config
            )
            parts = replace(parts, tokenizer=replace(config.tokenizer, path=directory))
        if config.drop_duplicates:
            report("looking for duplicates")
            _run_parts(list_hashes, parts, num_parts, report)
            numbers = range(1, num_parts + 1)
            hashes = [hashes_path(config, part, num_parts) for part in numbers]
            write_copies(hashes, [path.with_suffix(COPIES_SUFFIX) for path in hashes])
        _run_parts(_build_part, parts, num_parts, report)
        report("merging")
        return merge_parts(config, num_parts)


def _build_part(config: CorpusConfig, part: int, num_parts: int, report: Report) -> None:
    copies = hashes_path(config, part, num_parts).with_suffix(COPIES_SUFFIX)
    build_part(
        config, part, num_parts, report, read_hashes(copies) if config.drop_duplicates else None
    )


def _run_parts(task: Task, config: CorpusConfig, num_parts: int, report: Report) -> None:
    """Do `task` for all parts at the same time."""
    began, readings = time.monotonic(), {}
    with _processes(task, config, num_parts) as running:
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                part, process = running[connection]
                try:
                    what = connection.recv()
                except EOFError:
                    del running[connection]
                    _check_end(part, process)
                    continue
                if isinstance(what, Exception):
                    raise what
                readings[part] = what
            if len(readings) == num_parts:
                report(joined(readings.values(), time.monotonic() - began))


@contextlib.contextmanager
def _processes(
    task: Task, config: CorpusConfig, num_parts: int
) -> Iterator[dict[Connection, tuple[int, BaseProcess]]]:
    """A process for each part, by the connection to it; none is left when the block ends, however it ends."""
    # Forked from one process that has imported what takes seconds, before any of them has threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_pipeline.builder.processes", "streaming"])
    _start_server()
    running = {}
    try:
        for part in range(1, num_parts + 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, task, config, part, num_parts), daemon=True
            )
            process.start()
            theirs.close()
            running[ours] = (part, process)
        yield running
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _start_server() -> None:
    """Start what processes are forked from so that Ctrl-C, which reaches it too, does not end it in a traceback."""
    resource_tracker.ensure_running()  # else started by the next call, where it would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_end(part: int, process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise DataError(
            f"the process of part {part} ended with status {process.exitcode}, after a signal if below 0 (such as "
            "for want of memory); finished shards are kept: run the same command again, with fewer processes perhaps"
        )


def _work(
    connection: Connection, task: Task, config: CorpusConfig, part: int, num_parts: int
) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the command, which ends its processes
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()

    def send(what: str | Reading) -> None:
        if isinstance(what, Reading):
            connection.send(what)

    try:
        task(config, part, num_parts, send)
    except (UserError, OSError) as error:
        connection.send(error)


def _end_with(connection: Connection) -> None:
    """End this process when the one at the other end is gone, even by SIGKILL, so that the build can be begun again."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
