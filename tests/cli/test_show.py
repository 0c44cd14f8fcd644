"""`snapshot show`: one object, its statistics, and some of its values."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import Snapshot, StateDict, TakeOptions
from snapshot.cli import main, screen, tensor_values
from snapshot.cli.tensor_values import statistics
from snapshot.testing import recording


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    path = tmp_path_factory.mktemp("show") / "s"
    torch.manual_seed(3)
    odd = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, -3.0])
    state = StateDict(
        big=torch.randn(1000, 300), odd=odd, ints=torch.arange(-5, 5), none=torch.empty(0, 3), one=torch.tensor(2.5),
        flags=torch.tensor([True, False, True]), waves=torch.tensor([3 + 4j]),
        short=torch.ones(4, dtype=torch.bfloat16), tiny=torch.ones(4).to(torch.float8_e4m3fn),
        same=torch.full((100,), 7.0), array=np.arange(6.0).reshape(2, 3),
        sparse=torch.eye(3).to_sparse(), words=["a", {"b": None}], huge=10**6000, text="x" * 20_000,
        wide=torch.tensor([2**64 - 1], dtype=torch.uint64),
        when=np.array(["2026-01-01"], dtype="datetime64[D]"),
    )  # fmt: skip
    Snapshot.take(path, {"s": state}, options=TakeOptions(durable=False))
    return path, state


def show(capsys, path, *argv):
    assert main(["show", str(path), *argv]) == 0
    return capsys.readouterr().out


def told(capsys, path, *argv):
    return json.loads(show(capsys, path, *argv, "--json"))


def test_cli_show_describes_a_tensor(held, capsys):
    path, state = held
    shown = show(capsys, path, "s/big")
    assert shown.startswith("0/s/big\n")
    assert "float32[1000, 300]" in shown
    assert "histogram" in shown
    assert repr(state["big"][:8, :8]) in shown
    found = told(capsys, path, "0/s/big")
    assert found["statistics"]["mean"] == pytest.approx(state["big"].double().mean().item())
    assert found["statistics"]["std"] == pytest.approx(state["big"].double().std(correction=0).item())
    assert (found["statistics"]["min"], found["statistics"]["max"]) == (state["big"].min(), state["big"].max())
    assert sum(found["statistics"]["histogram"]) == 300_000


def test_cli_show_statistics_count_nan_and_infinity_apart(held, capsys):
    found = told(capsys, held[0], "s/odd")["statistics"]
    assert (found["count"], found["nan"], found["infinite"], found["zero"]) == (6, 1, 2, 1)
    assert (found["min"], found["max"], found["mean"]) == (-3.0, 1.0, pytest.approx(-2 / 3))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("ints", -5, 4), ("none", None, None), ("one", 2.5, 2.5), ("flags", 0, 1), ("waves", 5, 5), ("short", 1, 1),
        ("tiny", 1, 1), ("same", 7, 7), ("array", 0, 5), ("sparse", 1, 1), ("wide", float(2**64 - 1), float(2**64 - 1)),
    ],
)  # fmt: skip
def test_cli_show_has_statistics_for_every_kind_of_tensor(held, capsys, name, least, most):
    found = told(capsys, held[0], f"s/{name}")["statistics"]
    assert (found["min"], found["max"]) == (least, most)
    assert sum(found["histogram"]) == (found["count"] if least is not None else 0)
    assert show(capsys, held[0], f"s/{name}")


def test_cli_show_prints_values_that_are_not_tensors(held, capsys):
    path, _ = held
    assert show(capsys, path, "s/words").endswith("['a', {'b': None}]\n")
    assert "2026-01-01" in show(capsys, path, "s/when")
    assert show(capsys, path, "s/text").endswith("x... (20,002 characters)\n")
    assert len(show(capsys, path, "s/huge")) < 12_000
    assert "  big\n" in show(capsys, path, "s")


def test_cli_show_box_reads_only_the_box(held, capsys):
    path, state = held
    with recording("recording") as log:
        found = told(capsys, f"recording+file://{path}", "s/big", "--box", "500:502,:4", "--no-stats")
    assert torch.equal(torch.tensor(found["values"]), state["big"][500:502, :4])
    assert "statistics" not in found
    assert log.nbytes("read_into", "data/*.safetensors") < 300_000


def test_cli_show_reads_a_long_tensor_in_parts(held, capsys, monkeypatch):
    path, _ = held
    whole = told(capsys, path, "s/big")["statistics"]
    monkeypatch.setattr(tensor_values, "AT_ONCE", 64 << 10)
    with recording("recording") as log:
        parts = told(capsys, f"recording+file://{path}", "s/big")["statistics"]
    assert parts["histogram"] == whole["histogram"]
    assert parts["std"] == pytest.approx(whole["std"], rel=1e-12)
    assert max(each.nbytes for each in log.of("read_into", "data/*.safetensors")) <= 512 << 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["s/bgi"], "did you mean 's/big'"),
        (["s/big", "--rank", "3"], "'3/s/big' not found"),
        (["s/big", "--box", "a"], "invalid box"),
        (["s/big", "--box", "0:1,0:1,0:1"], "box"),
        (["s/big", "--box", "5000"], ""),
        (["s/one", "--box", "0"], "box"),
        (["s/words", "--box", "0"], "a container has no box"),
        (["s/huge", "--box", "0"], "only a tensor has a box"),
        (["s/array", "--box", "0"], "box"),
        (["s/sparse", "--box", "0"], "box"),
    ],
)
def test_cli_show_exits_2_if_the_object_cannot_be_shown(held, capsys, argv, message):
    assert main(["show", str(held[0]), *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""


FLOATS = st.floats(width=32) | st.floats(-10, 10)


@given(st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=5))
def test_show_statistics_of_parts_equal_those_of_the_whole(parts):
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    found = statistics(lambda: iter(tensors))
    whole = torch.cat(tensors)
    good = whole[whole.isfinite()]
    assert (found.count, found.nan) == (whole.numel(), int(whole.isnan().sum()))
    assert found.infinite == int(whole.isinf().sum())
    if not good.numel():
        assert found.least is None
        return
    assert (found.least, found.most) == (good.min(), good.max())
    scale = max(1.0, float(good.abs().max()))
    assert found.mean == pytest.approx(good.mean().item(), abs=1e-9 * scale)
    assert found.deviation == pytest.approx(good.std(correction=0).item(), abs=1e-7 * scale, rel=1e-6)
    assert sum(found.histogram) == good.numel()


def test_show_statistics_of_the_largest_numbers_have_a_histogram():
    most = torch.finfo(torch.float64).max
    found = statistics(lambda: iter([torch.tensor([-most, 0.0, most], dtype=torch.float64)]))
    assert (found.least, found.most, sum(found.histogram)) == (-most, most, 3)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A snapshot of dtypes that torch can do little with."""
    path = tmp_path_factory.mktemp("odd") / "s"
    raw = torch.arange(64, dtype=torch.uint8).view(8, 8)
    names = ("float4_e2m1fn_x2", "int4", "uint3", "bits8", "bits4x2", "bits16")
    state = {name: raw.view(getattr(torch, name)) for name in names if hasattr(torch, name)}
    Snapshot.take(path, {"s": StateDict(**state)}, options=TakeOptions(durable=False))
    return path, raw, list(state)


def test_cli_show_prints_bits_without_statistics_for_dtypes_torch_cannot_compute(odd, capsys):
    path, raw, names = odd
    assert len(names) > 3
    for name in names:
        shown = show(capsys, path, f"s/{name}", "--box", "2:4,1:3")
        assert "no statistics for this dtype" in shown, name
        kind = torch.uint16 if name == "bits16" else torch.uint8
        assert f"values[2:4, 1:3], as {str(kind)[6:]}:\n{raw.view(kind)[2:4, 1:3]!r}\n" in shown, name
        found = told(capsys, path, f"s/{name}", "--box", "2:4,1:3")
        assert found["statistics"] is None
        assert found["values"] == raw.view(kind)[2:4, 1:3].tolist()


def test_read_object_box_of_dtypes_that_torch_cannot_copy(odd):
    path, raw, names = odd
    for name in names:
        box = (slice(1, 7), slice(1, 3))
        made = Snapshot(path).read_object(f"0/s/{name}", box=box)
        assert made.dtype == getattr(torch, name)
        kind = torch.int16 if name == "bits16" else torch.uint8
        assert torch.equal(made.view(kind), raw.view(kind)[box])


def test_cli_show_box_beyond_the_tensor_is_an_error_and_a_partial_one_is_clipped(held, capsys):
    path, state = held
    for box in ("5000:6000", "0:2,300:", "3:3", "4:2"):
        assert main(["show", str(path), "s/big", "--no-stats", "--box", box]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "is empty within shape [1000, 300]" in err
    shown = show(capsys, path, "s/big", "--no-stats", "--box", "998:2000,-2:")
    assert f"values[998:1000, 298:300]:\n{state['big'][998:, 298:]!r}\n" in shown
    assert "values[0:0" in show(capsys, path, "s/none", "--no-stats", "--box", ":")


def test_cli_show_hides_warnings_of_torch(tmp_path, warm):
    script = f"""
import sys, warnings
import torch
from snapshot import Snapshot, StateDict
from snapshot.cli import main
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name, value in (("a", 1 + 2j), ("b", 4)):
        made = torch.tensor([value, 3], dtype=torch.complex32)
        Snapshot.take(f"{tmp_path}/{{name}}", {{"s": StateDict(x=made)}})
assert main(["show", "{tmp_path}/a", "s/x"]) == 0
assert main(["diff", "{tmp_path}/a", "{tmp_path}/b", "--values"]) == 1
"""
    printed = warm.run(script)
    assert "Warning" not in printed
    assert "warning" not in printed
    assert "1 of 2 differ, at most by 3.60555" in printed


def test_cli_show_of_a_value_whose_repr_fails_prints_its_type():
    class Silent:
        def __repr__(self):
            raise RuntimeError("unknown quantizer")

    assert "Silent that cannot be printed: RuntimeError: unknown quantizer" in screen.repr_text(Silent())
