"""Numbers are printed with digits enough to compare plans."""

import pytest

from unity_ir.cost.stats import bytes_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1.8524, "1.852 s"),
        (18.524, "18.52 s"),
        (185.24, "185.2 s"),
        (1852.4, "1852.4 s"),
        (0.12, "120.0 ms"),
        (0.00104, "1.04 ms"),
        (5.71e-5, "57.1 us"),
        (7.9e-6, "7.90 us"),
        (1.2e-8, "0.01 us"),
    ],
)
def test_seconds(seconds: float, said: str):
    assert seconds_text(seconds) == said


def test_bytes():
    assert [bytes_text(n) for n in (0, 999, 1_500_000, 76_100_000_000, 813_056)] == [
        "0 B",
        "999 B",
        "1.50 MB",
        "76.1 GB",
        "813.1 kB",
    ]
