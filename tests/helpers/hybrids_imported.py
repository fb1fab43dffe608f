"""Classes of transformers, for ranks that are forked: each would import them for seconds."""

from pretrain.model.transformers_modules import library
from tests.helpers.hybrids import RIGHT

with library() as transformers:
    for kind in RIGHT:
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[kind]]
