"""Build all parts at the same time, one process each. The processes end with their command.

To drop duplicates across parts, each process first lists the hashes of its texts; then each part
is told which of its texts an earlier part has too. It then drops the same documents as a build by
one process would. P parts, N hashes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from data_pipeline.builder.build_corpus import (
    BuildResult,
    last_modified,
    list_all_sources,
    recipe_of,
    training_sources,
)
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.journal import BuildJournal, claimed_output, is_finished
from data_pipeline.builder.parts import (
    build_part,
    check_output,
    merge_parts,
    part_directories,
    shared_directory,
    shuffle_one,
    sources_of_parts,
)
from data_pipeline.builder.records import HASH_BYTES, Document, hash_of
from data_pipeline.builder.splits import check_sources
from data_pipeline.builder.train_tokenizer import (
    describe_tokenizer,
    needs_training,
    prepare_tokenizer,
)
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.errors import DataError, UserError
from data_pipeline.files import atomic_write
from data_pipeline.progress import Note, Reading, Report, joined

Task = Callable[[CorpusConfig, int, int, Report], None]  # (config, part, number of parts, report)
COPIES_SUFFIX = ".copies"  # of the list of those hashes of a part that an earlier part has


def build_in_processes(
    config: CorpusConfig, processes: int, report: Report = lambda what: None
) -> BuildResult:
    """Build one part per process and merge them; the same call resumes after a kill.

    There are never more parts than input files.
    """
    sources = list_all_sources(config, report)
    num_parts = min(processes, len(sources))
    if is_finished(config.output):
        return merge_parts(config, num_parts)
    check_sources(config, sources)
    check_output(config, sources, num_parts)
    shared = shared_directory(config, num_parts)
    with claimed_output(shared, part_directories(config, num_parts)):
        # Its journal rejects a resume with other text or settings.
        BuildJournal(shared, recipe_of(config, sources), last_modified(sources))
        threads = max(1, (config.threads or os.cpu_count() or 1) // num_parts)
        part_config = replace(config, threads=threads)
        if needs_training(config.tokenizer):
            directory = shared / TOKENIZER_DIRECTORY
            report(f"tokenizer: {describe_tokenizer(config.tokenizer)}")
            prepare_tokenizer(directory, training_sources(sources), config)
            part_config = replace(part_config, tokenizer=replace(config.tokenizer, path=directory))
        if config.drop_duplicates:
            report("searching for duplicates")
            _run_parts(_list_hashes, part_config, num_parts, report)
            _list_copies(
                [_hashes_path(config, part, num_parts) for part in range(1, num_parts + 1)]
            )
        _run_parts(_build_part, part_config, num_parts, report)
        if config.shuffles:
            report("shuffling")
            _run_parts(shuffle_one, part_config, num_parts, report)
        report("merging")
        return merge_parts(config, num_parts)


# ------------------------------------------------------------------------------------------- tasks


def _build_part(config: CorpusConfig, part: int, num_parts: int, report: Report) -> None:
    seen = None
    if config.drop_duplicates:
        content = _hashes_path(config, part, num_parts).with_suffix(COPIES_SUFFIX).read_bytes()
        starts = range(0, len(content), HASH_BYTES)
        seen = {content[start : start + HASH_BYTES] for start in starts}
    build_part(config, part, num_parts, report, seen, is_checked=True)


def _list_hashes(config: CorpusConfig, part: int, num_parts: int, report: Report) -> None:
    """Write the hash of every text of the part, each once, unless a killed build has done so."""
    path = _hashes_path(config, part, num_parts)
    if path.exists():
        return
    hashes = {
        hash_of(document.content)
        for _, source in sources_of_parts(list_all_sources(config), num_parts)[part - 1]
        for document in read_documents(source, config)
        if isinstance(document, Document)
    }
    with atomic_write(path) as file:
        file.write(b"".join(sorted(hashes)))


def _hashes_path(config: CorpusConfig, part: int, num_parts: int) -> Path:
    return shared_directory(config, num_parts) / f"{part:05d}.hashes"


def _list_copies(hash_lists: Sequence[Path]) -> None:
    """For each part in order, list those of its hashes that an earlier part has too."""
    lists = [np.fromfile(path, "<u8").reshape(-1, 2) for path in hash_lists]
    hashes_N2 = np.concatenate(lists)
    parts_N = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    # Sorted so that equal hashes are neighbors, the one of the first part in front.
    order_N = np.lexsort((parts_N, hashes_N2[:, 1], hashes_N2[:, 0]))
    is_repeated = (hashes_N2[order_N[1:]] == hashes_N2[order_N[:-1]]).all(1)
    later = order_N[1:][is_repeated]
    for part, path in enumerate(hash_lists):
        with atomic_write(path.with_suffix(COPIES_SUFFIX)) as file:
            file.write(hashes_N2[later[parts_N[later] == part]].tobytes())


# --------------------------------------------------------------------------------------- processes


def _run_parts(task: Task, config: CorpusConfig, num_parts: int, report: Report) -> None:
    """Run `task` for all parts at the same time; report their joint progress."""
    if num_parts == 1:
        return task(config, 1, 1, report)
    started, readings = time.monotonic(), {}
    with _processes(task, config, num_parts) as running:
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                part, process = running[connection]
                try:
                    message = connection.recv()
                except EOFError:
                    del running[connection]
                    _check_exit(part, process)
                    continue
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Note):
                    report(message)
                    continue
                readings[part] = message
            if len(readings) == num_parts:
                report(joined(readings.values(), time.monotonic() - started))
    return None


@contextlib.contextmanager
def _processes(
    task: Task, config: CorpusConfig, num_parts: int
) -> Iterator[dict[Connection, tuple[int, BaseProcess]]]:
    """Start a process for each part; all are killed at the end of the block."""
    # Forked from a server that has imported the slow modules and has no threads: forking this
    # process, which may have some, could deadlock.
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
    """Start the fork server with SIGINT blocked: Ctrl-C reaches it and would print a traceback.

    Both processes are started in the root directory, because Python imports their modules from the
    working directory first. Those that the server forks return to ours, with our `sys.path`.
    """
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        os.chdir("/")
        # Started here because the fork server would start it later, with SIGINT unblocked.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        os.fchdir(here)
        os.close(here)


def _check_exit(part: int, process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise DataError(
            f"the process of part {part} exited with status {process.exitcode} (below 0: killed by "
            "that signal, for example when host memory ran out); finished shards are kept: run "
            "the same command again, perhaps with fewer processes"
        )


def _work(
    connection: Connection, task: Task, config: CorpusConfig, part: int, num_parts: int
) -> None:
    # Ctrl-C reaches the command too, which kills its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(connection,), daemon=True).start()

    def send(what: str | Reading | Note) -> None:
        # Notes of one part are enough: they are about the tokenizer and the whole input.
        if isinstance(what, Reading) or (isinstance(what, Note) and part == 1):
            connection.send(what)

    try:
        task(config, part, num_parts, send)
    except (UserError, OSError) as error:
        connection.send(error)


def _exit_with(connection: Connection) -> None:
    """Exit when the command is gone, even by SIGKILL, so that the build can be restarted."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
