"""Seconds of collectives, against numbers worked out by hand."""

import pytest

from jpaged.collectives import COLLECTIVES, Link, all_reduce_seconds, collective_seconds
from jpaged.errors import RequestError

LINK = Link(bandwidth=100e9, latency=2e-6)


@pytest.mark.parametrize(
    ("num_bytes", "devices", "seconds"),
    [
        (1e9, 1, 0),
        (1e9, 2, 10e-3 + 2e-6),       # one-shot: as many bytes as the ring, and one step instead of two
        (1e9, 8, 17.5e-3 + 28e-6),    # ring: 2 * 7 / 8 of the bytes, 14 steps
        (1e5, 8, 7e-6 + 2e-6),        # one-shot: 7 times the bytes; the ring would take 29.75 us
        (0, 8, 2e-6),
    ],
)  # fmt: skip
def test_all_reduce(num_bytes, devices, seconds):
    assert all_reduce_seconds(num_bytes, devices, LINK) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-reduce", 15e-3 + 12e-6),
        ("all-gather", 7.5e-3 + 6e-6),
        ("reduce-scatter", 7.5e-3 + 6e-6),
        ("all-to-all", 7.5e-3 + 2e-6),
        ("collective-permute", 10e-3 + 2e-6),
    ],
)
def test_each_kind_over_four_devices(kind, seconds):
    assert collective_seconds(kind, 1e9, 4, LINK) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_device_sends_nothing(kind):
    assert collective_seconds(kind, 1e9, 1, LINK) == 0


@pytest.mark.parametrize(
    ("bandwidth", "latency", "says"),
    [(0, 1e-6, "link_bandwidth"), (float("inf"), 1e-6, "link_bandwidth"), (float("nan"), 1e-6, "link_bandwidth"),
     (1e9, -1e-6, "link_latency"), (1e9, float("nan"), "link_latency")],
)  # fmt: skip
def test_a_faulty_link_is_refused(bandwidth, latency, says):
    with pytest.raises(RequestError, match=says):
        Link(bandwidth, latency)
