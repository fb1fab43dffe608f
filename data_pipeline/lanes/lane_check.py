"""Whether a number of lanes suits a corpus."""

from __future__ import annotations

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.lanes.lane_plan import LanePlan

COMFORTABLE_RATIO = 20  # tokens of a lane per token of the longest document


def check_lanes(plan: LanePlan, longest_document: int) -> str:
    """Advice, or "" when there is none; DataError when a lane would have nothing to read.

    A lane is empty when one document covers its whole share, so with T/N at least the longest document none ever is.
    """
    share = plan.num_tokens // plan.num_lanes
    at_most = max(1, plan.num_tokens // max(longest_document, 1))
    if share < longest_document and not (lengths := plan.lane_lengths(0)).all():
        raise DataError(
            f"{plan.num_tokens} tokens are too few for {plan.num_lanes} lanes: the longest document has "
            f"{longest_document} tokens and lane {int(np.argmin(lengths))} would be empty; "
            f"use at most {at_most} lanes, more text, or shorter documents"
        )
    if share < COMFORTABLE_RATIO * longest_document:
        comfortable = plan.num_tokens // (COMFORTABLE_RATIO * max(longest_document, 1))
        fewer = f"; up to {comfortable} lanes would be even" if comfortable else ""
        return (
            f"{plan.num_lanes} lanes of {share} tokens are short beside the longest document of {longest_document} "
            f"tokens: they will differ in length and cross epochs at different steps{fewer}"
        )
    return ""
