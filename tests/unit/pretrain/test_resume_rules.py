from __future__ import annotations

from foundation.settings import settings_of
from pretrain.config.run import RunConfig, may_change

FIXED = {
    *("name", "seed", "initial_weights", "engine.kind"),
    *("data.lanes", "data.segment_length", "data.mixture"),
}


def test_what_another_model_or_other_tokens_follow_from_may_not_change_in_a_resume():
    for key in (each.name.replace("[]", "") for each in settings_of(RunConfig)):
        section = key.partition(".")[0]
        if key in ("data", "optim", "model"):
            continue  # of which some settings may change
        is_fixed = section in ("model", "optim") or key.startswith("data.mixture")
        expected = key == "optim.steps" or not (is_fixed or key in FIXED)
        assert may_change(key) is expected, key
    assert may_change("engine.deepspeed_extra.zero_optimization.stage")
