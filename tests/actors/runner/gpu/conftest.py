"""Larger tiles in Triton's interpreter, whose time goes by programs; tests/kernels has others."""

import pytest


@pytest.fixture(autouse=True)
def in_few_programs(few_programs: None) -> None:
    pass
