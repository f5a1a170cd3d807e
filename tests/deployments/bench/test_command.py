"""``rayfin bench``: what its flags refuse, named as the user wrote them."""

import pytest

from rayfin.deployments.cli.main import main


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("serve --request-rate x", "--request-rate"),
        ("serve --burstiness 0", "--burstiness"),
        ("serve --ramp-to 0 --request-rate 1", "--ramp-to"),
        ("serve --ramp-to 5", "--ramp-to"),
        ("serve --goodput itl:5", "--goodput"),
        ("throughput --prompt-tokens 9-5", "--prompt-tokens"),
        ("throughput --dataset trace", "--dataset-file"),
    ],
)
def test_wrong_flags(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags.split()]) == 2
    assert named in capsys.readouterr().err
