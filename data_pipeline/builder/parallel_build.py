"""Build one corpus in n parts, by processes or by the tasks of an array job, and merge them.

A part is a contiguous range of the input files, of about 1/n of the bytes. It is a build of its own
in OUTPUT.parts, resumable like any build. The merge moves the shards of all parts into one corpus.
The documents and their order do not depend on n. The borders of shards do, because each part ends
a shard.

`build_in_processes` builds all parts at the same time, in processes that end with their command.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from data_pipeline.builder.build_corpus import (
    BuildResult,
    build_sources,
    last_modified,
    list_all_sources,
    recipe_of,
    result_of,
    training_sources,
)
from data_pipeline.builder.build_tokenizer import (
    describe_tokenizer,
    needs_training,
    prepare_tokenizer,
)
from data_pipeline.builder.journal import (
    BuildJournal,
    check_is_free,
    check_recipe,
    claimed_output,
    is_built,
    is_started,
)
from data_pipeline.builder.records import REJECTS_NAME
from data_pipeline.builder.shuffle import directories_of, shuffle_part
from data_pipeline.builder.sources import PARTS_SUFFIX
from data_pipeline.builder.split_writer import (
    Reading,
    Sources,
    check_sources,
    splits_of_build,
    sum_of_readings,
)
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.lengths import files_of, lengths_beside
from data_pipeline.corpora.manifest import (
    TOKENIZER_DIRECTORY,
    ShardInfo,
    check_shard,
    read_manifest,
)
from data_pipeline.shards.shards import read_index, renamed, shard_name, write_index
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError, DataError, UserError
from foundation.files import atomic_write, fsync_directory, lines_of, make_directory, move
from foundation.progress import Note, Report

PART_NAMES = f"{5 * '[0-9]'}-of-{5 * '[0-9]'}"  # matches the names of parts' directories


def parts_directory(config: CorpusConfig) -> Path:
    """Return where parts are built: next to the output, so that shards can be moved there."""
    output = config.output.resolve()
    return output.with_name(f"{output.name}{PARTS_SUFFIX}")


def shared_directory(config: CorpusConfig, num_parts: int) -> Path:
    """Return the directory of the tokenizer that all parts share, if one command builds them."""
    return _directory(config, 0, num_parts)


def part_directories(config: CorpusConfig, num_parts: int) -> list[Path]:
    """Return where each part is built."""
    return [_directory(config, part, num_parts) for part in range(1, num_parts + 1)]


def _directory(config: CorpusConfig, part: int, num_parts: int) -> Path:
    return parts_directory(config) / f"{part:05d}-of-{num_parts:05d}"


def build_part(
    config: CorpusConfig,
    part: int,
    num_parts: int,
    report: Report = lambda what: None,
    is_checked: bool = False,
) -> BuildResult:
    """Build or resume part `part` of 1 to `num_parts`; parts may be built at the same time.

    With `is_checked`, the caller has called `check_sources` and `check_output` with the user's
    settings. In `config`, tokenizer.path may then name a tokenizer that the caller has trained.
    """
    if not 1 <= part <= num_parts:
        raise ConfigError(f"found part {part} of {num_parts}, expected I/N with I from 1 to N")
    if needs_training(config.tokenizer):
        raise ConfigError(
            "parts need an existing tokenizer; set tokenizer.path to one, such as the tokenizer of "
            "a corpus built from a sample of the text"
        )
    sources = list_all_sources(config, report)
    if is_built(config.output):  # an array job's task was requeued after the merge
        check_recipe(config.output, _merged_recipe(config, sources, num_parts))
        return result_of(config.output, was_finished=True)
    if not is_checked:
        check_sources(config, sources)
        check_output(config, sources, num_parts)
    make_directory(parts_directory(config))
    part_config = replace(config, output=_directory(config, part, num_parts))
    part_sources = sources_of_parts(sources, num_parts)[part - 1]
    return build_sources(part_config, part_sources, report, is_part=True)


def check_output(config: CorpusConfig, sources: Sources, num_parts: int) -> None:
    """Raise ConfigError, before hours of work, if the parts could not be merged."""
    check_is_free(config.output)
    if is_started(config.output):
        BuildJournal(config.output, _merged_recipe(config, sources, num_parts), modified=0)


def sources_of_parts(sources: Sources, num_parts: int) -> list[Sources]:
    """Return the files of each part: a file is in the part whose share of bytes it begins in."""
    total, offset = sum(source.size for _, source in sources), 0
    parts: list[Sources] = [[] for _ in range(num_parts)]
    for split, source in sources:
        # `min`: an empty file after all bytes begins in no share.
        part = min(offset * num_parts // max(total, 1), num_parts - 1)
        parts[part].append((split, source))
        offset += source.size
    return parts


def shuffle_one(config: CorpusConfig, part: int, num_parts: int, report: Report) -> None:
    """Write stretch `part` of the shuffled documents of all parts; all parts must be finished."""
    shuffle_part(config, part_directories(config, num_parts), part, report)


def can_shuffle(config: CorpusConfig, num_parts: int) -> bool:
    """Whether documents are to be shuffled and all parts are finished."""
    return config.shuffles and all(map(is_built, part_directories(config, num_parts)))


def merge_parts(
    config: CorpusConfig, num_parts: int, report: Report = lambda what: None
) -> BuildResult:
    """Move finished parts into one corpus, shuffled if that is set; resumes after a kill.

    DataError if a part is not finished.
    """
    sources = list_all_sources(config)
    recipe = _merged_recipe(config, sources, num_parts)
    if is_built(config.output):
        with claimed_output(config.output):  # removes what a kill at the very end has left
            check_recipe(config.output, recipe)
        _remove_parts(config)
        return result_of(config.output, was_finished=True)
    _check_parts(config, sources, num_parts)
    splits = splits_of_build(config)
    directories = part_directories(config, num_parts)
    with claimed_output(config.output) as output:
        journal = BuildJournal(output, recipe, modified=0)
        tokenizer = Tokenizer.load(directories[0] / TOKENIZER_DIRECTORY)
        tokenizer.save(output / TOKENIZER_DIRECTORY)
        _merge_rejects(config, directories)
        if config.shuffles:
            for part in range(1, num_parts + 1):
                shuffle_one(config, part, num_parts, report)
        for split in reversed(splits):  # train last: its manifest shows that all is written
            parts_of_split = [directory / split for directory in directories]
            if config.shuffles:
                parts_of_split = directories_of(directories, split)
            _merge_split(config, parts_of_split, output / split)
        journal.finish()
    _remove_parts(config)
    return result_of(config.output)


def _merged_recipe(config: CorpusConfig, sources: Sources, num_parts: int) -> dict[str, Any]:
    """Return all that the merged corpus depends on; unless shuffled, also the number of parts."""
    recipe = recipe_of(config, sources)
    return recipe if config.shuffles else {**recipe, "parts": num_parts}


def _check_parts(config: CorpusConfig, sources: Sources, num_parts: int) -> None:
    """Raise DataError unless each part is finished, ConfigError if one has another recipe."""
    trained = shared_directory(config, num_parts) / TOKENIZER_DIRECTORY
    if needs_training(config.tokenizer) and trained.exists():
        config = replace(config, tokenizer=replace(config.tokenizer, path=trained))
    for part, part_sources in enumerate(sources_of_parts(sources, num_parts), 1):
        directory = _directory(config, part, num_parts)
        if not is_built(directory):
            raise DataError(
                f"part {part} of {num_parts} is not finished; "
                f"run `build --part {part}/{num_parts}` first"
            )
        check_recipe(directory, recipe_of(config, part_sources))


def _merge_split(config: CorpusConfig, parts: list[Path], target: Path) -> None:
    """Move the shards of all parts and renumber them; write index and manifest at the end."""
    make_directory(target)
    manifests = [read_manifest(part) for part in parts]
    shards: list[ShardInfo] = []
    entries = []
    for part, manifest in zip(parts, manifests, strict=True):
        index = read_index(part, len(manifest.shards))
        for shard, entry in zip(manifest.shards, index, strict=True):
            name = shard_name(len(shards), config.shard_format)
            moved = replace(shard, path=name)
            for old, new in zip(files_of(shard), files_of(moved), strict=True):
                if (part / old).exists():  # else a killed merge has moved it already
                    move(part / old, target / new, sync=False)
            check_shard(target / name, shard, with_hash=False)
            lengths_beside(target, moved)
            shards.append(moved)
            entries.append(renamed(entry, name))
    fsync_directory(target)
    write_index(target, entries)
    replace(manifests[0], shards=tuple(shards)).write(target)


def _merge_rejects(config: CorpusConfig, parts: list[Path]) -> None:
    paths = [part / REJECTS_NAME for part in parts if (part / REJECTS_NAME).exists()]
    count = sum(1 for path in paths for _ in lines_of(path))
    if count > config.max_rejects:
        raise DataError(
            f"the parts have {count} unusable records, more than max_rejects={config.max_rejects}; "
            f"they are listed in {parts_directory(config)}/*/{REJECTS_NAME}: "
            "fix them or raise max_rejects"
        )
    if paths:
        with atomic_write(config.output / REJECTS_NAME) as merged:
            for path in paths:
                merged.writelines(lines_of(path))


def _remove_parts(config: CorpusConfig) -> None:
    """Remove the parts, and their directory unless it holds other files."""
    directory = parts_directory(config)
    for path in directory.glob(PART_NAMES):
        shutil.rmtree(path)
    with contextlib.suppress(OSError):  # it is absent or not empty
        directory.rmdir()


Task = Callable[[CorpusConfig, int, int, Report], Any]  # (config, part, number of parts, report)


def build_in_processes(
    config: CorpusConfig, processes: int, report: Report = lambda what: None
) -> BuildResult:
    """Build one part per process and merge them; the same call resumes after a kill.

    There are never more parts than input files.
    """
    sources = list_all_sources(config, report)
    num_parts = min(processes, len(sources))
    if is_built(config.output):
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
        _run_parts(partial(build_part, is_checked=True), part_config, num_parts, report)
        if config.shuffles:
            report("shuffling")
            _run_parts(shuffle_one, part_config, num_parts, report)
        report("merging")
        return merge_parts(config, num_parts)


# --------------------------------------------------------------------------------------- processes


def _run_parts(task: Task, config: CorpusConfig, num_parts: int, report: Report) -> None:
    """Run `task` for all parts at the same time; report the sums of their progress."""
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
                report(sum_of_readings(readings.values(), time.monotonic() - started))
    return None


@contextlib.contextmanager
def _processes(
    task: Task, config: CorpusConfig, num_parts: int
) -> Iterator[dict[Connection, tuple[int, BaseProcess]]]:
    """Start a process for each part; all are killed at the end of the block."""
    # A server without threads imports the slow modules, and forks the processes. To fork this
    # process, which may have threads, could deadlock.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_pipeline.builder.parallel_build", "streaming"])
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
    """Start the fork server with SIGINT blocked: at Ctrl-C it would print a traceback.

    The server and the resource tracker start in the root directory, because Python would import
    their modules from the working directory first. A process that the server forks changes to our
    working directory and `sys.path`.
    """
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        os.chdir("/")
        # Start the tracker here: the fork server would start it later, with SIGINT unblocked.
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
    # Ctrl-C reaches the command, too, and it then kills its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(connection,), daemon=True).start()

    def send(what: object) -> None:
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
