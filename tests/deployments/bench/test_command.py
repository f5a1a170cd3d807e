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
        ("throughput --dataset trace", "--dataset-path"),
        ("throughput --dataset-name timed_trace", "--dataset-path"),
        ("serve --trace-speed 2", "--trace-speed"),
        ("serve --dataset-name burstgpt --trace-speed 0", "--trace-speed"),
        ("serve --dataset-name burstgpt --trace-speed 2 --request-rate 1", "--trace-speed"),
        ("serve --dataset-name burstgpt --request-rate 1 --ramp-to 2", "--ramp-to"),
        ("serve --ramp-up-strategy linear --ramp-up-end-rps 5", "--ramp-up-start-rps"),
        ("serve --ramp-up-start-rps 5", "--ramp-up-strategy"),
        ("serve --find-rate 0.9", "--goodput"),
        ("serve --find-rate 0 --goodput ttft:500", "--find-rate"),
        ("serve --find-rate 90% --goodput ttft:500 --plot x.png", "--plot"),
        ("serve --find-rate 120 --goodput ttft:500", "--find-rate"),
        ("agents --kill scheduler", "--kill"),
        ("agents --kill proxy@3", "--kill"),
    ],
)
def test_wrong_flags(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags.split()]) == 2
    assert named in capsys.readouterr().err
