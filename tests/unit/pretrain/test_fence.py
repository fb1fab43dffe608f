from __future__ import annotations

import pytest

from foundation.errors import UserError
from pretrain.rundir.lock import Fence


def test_only_the_newest_attempt_may_write(tmp_path):
    old, new = Fence(tmp_path, "7.0.1"), Fence(tmp_path, "7.1.2")
    old.claim()
    old.check()
    new.claim()
    new.check()
    with pytest.raises(UserError, match=r"attempt 7\.0\.1 exits: attempt 7\.1\.2 has claimed"):
        old.check()
