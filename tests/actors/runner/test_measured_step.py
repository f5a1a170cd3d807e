"""Steps are measured within the context of a model, however short it is."""

from pathlib import Path

from pooling_models import make_decoder
from rayfin.actors.config import EngineArgs
from rayfin.deployments.offline.engines import start_engine


def test_a_short_context(tmp_path: Path) -> None:
    args = EngineArgs(model=str(make_decoder(tmp_path)), threads=1, num_pages=64)
    engine = start_engine("inline", args)
    assert engine.info.max_model_len == 64
    engine.close()
