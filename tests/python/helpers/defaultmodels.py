"""The two default models, for tests and doctests that name no model. Their weights come from MPOOL_TEST_WEIGHTS or the
catalogue."""

import mpool
from mpool.runtime.entry import Entry
from mpool.api.functions import default_pool
from realmodels import find_real, real_path

MINILM, SMOLLM2 = "all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"


def use_default_models() -> None:
    """Register the default models with the default pool. Skips the test if their weights are not available."""
    pool = default_pool()
    for key, name, capability in ((MINILM, "minilm", "text_embedding"), (SMOLLM2, "smollm2", "text_to_text")):
        if key in pool._names.by_key:
            continue
        if find_real(name) is None:
            try:
                mpool.models.resolve(key)
            except mpool.MpoolError:
                real_path(name)
        else:
            pool._names.by_key[key] = pool._names.by_name[key] = Entry(pool, key, str(real_path(name)), capability)
