"""Whatever a file holds, its reader reads it rightly or refuses it in words: see `examine`.

The examples here are the same every time; `make fuzz` takes others, for an hour.
"""

from functools import partial

from tests.fuzz.examine import bounded_memory, examine, try_changes
from tests.fuzz.targets import Workplace

SECONDS = 0.1  # of each target: 5 examples of the fastest, none of those that draw charts


def test_changed_files_are_read_rightly_or_refused_in_words(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "valid").mkdir()
    targets = Workplace(tmp_path / "valid").make()
    with bounded_memory():
        for target in targets.values():
            if count := int(SECONDS / target.seconds):
                attempt = partial(examine, target, work=work)
                try_changes(target, targets, count, attempt, is_repeatable=True)
