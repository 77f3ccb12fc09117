"""What the front believes of a probe's lines."""

from __future__ import annotations

import json

import pytest

from slimproc.residency.probes.lines import BadLine, Line, decode_line, decode_watch, encode, watch_line
from slimproc.residency.views import DeviceSample

HOST = {"kind": "host", "name": "host memory", "total": 100, "free": 50}
GPU = {"kind": "gpu", "name": "A", "total": 100, "free": 50}


def line(**fields):
    return json.dumps({"taken": 1.0, "devices": {"host": HOST}, **fields}).encode()


def gpu(**fields):
    return line(devices={"host": HOST, "GPU-1": {**GPU, **fields}})


def test_a_line_comes_as_it_was_sent_with_the_order_of_its_devices():
    sent = Line(
        1.5,
        {
            "host": DeviceSample("host", "host memory", 100, 50, {7: 3}, {7: 9}),
            "GPU-b": DeviceSample("gpu", "B", 10, 0, None, fault="lost", index=0),
            "GPU-a": DeviceSample("unified", "A", 10, 4, {}, index=1),
        },
        "driver_mismatch",
        {3: "lost"},
    )
    decoded = decode_line(encode(sent), now=2.0)
    assert decoded == sent
    assert list(decoded.devices) == ["host", "GPU-b", "GPU-a"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"taken": 1.0',
        line() + b"x",
        line(taken=3.0),
        line(taken=-1.0),
        line(taken="1"),
        line(taken=True),
        line(taken=None),
        b'{"taken": 1e999, "devices": {}}',
        line(devices={}),
        line(devices={"GPU-1": GPU}),
        line(devices={"host": GPU}),
        line(devices={"host": HOST, "GPU-1": HOST}),
        line(devices={"host": HOST, "": GPU}),
        line(devices={"host": HOST, "GPU-\n": GPU}),
        line(devices={"host": HOST, "GPU-" + "x" * 400: GPU}),
        line(devices={"host": HOST} | {f"GPU-{number}": GPU for number in range(300)}),
        gpu(free=-1),
        gpu(free=101),
        gpu(free=1.5),
        gpu(free="50"),
        gpu(total=1 << 60),
        gpu(total=10**40),
        gpu(kind="tpu"),
        gpu(name="x" * 400),
        gpu(fault="x" * 400),
        gpu(attributed={"x": 1}),
        gpu(attributed={"7": -1}),
        gpu(attributed={"-7": 1}),
        gpu(attributed=[]),
        gpu(mapped=None),
        gpu(index="0"),
        line(driver="x" * 400),
        line(unnamed={"0": "x" * 400}),
        line(more=1),
    ],
)
def test_nonsense_is_refused_with_a_reason(text):
    with pytest.raises(BadLine) as caught:
        decode_line(text, now=2.0)
    assert str(caught.value)


def test_the_probe_hears_whom_to_watch():
    assert decode_watch(watch_line([3, 1, 2])) == {1, 2, 3}
    assert decode_watch(watch_line([])) == frozenset()
