"""What the final stage of the Dockerfile holds, and where its caches are."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_final_stage_has_a_compiler() -> None:
    """Triton compiles its driver stub at the first launch: without one no GPU engine starts."""
    final = (ROOT / "Dockerfile").read_text().rsplit("FROM ", 1)[1]
    install = final.split("apt-get install", 1)[1].split("&&", 1)[0].split()
    assert {"gcc", "libc6-dev"} <= set(install)


def test_compiled_kernels_stay_on_the_volume_of_the_models() -> None:
    patches = yaml.safe_load((ROOT / "k8s/overlays/single-gpu/gpu.yaml").read_text())
    added = [patch["value"] for patch in patches if patch["path"].endswith("/env/-")]
    values = {entry["name"]: entry.get("value") for entry in added}
    assert Path(values["TRITON_CACHE_DIR"]).is_relative_to(values["HF_HOME"])
