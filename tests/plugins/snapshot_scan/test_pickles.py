"""`snapshot scan` of pickles: every name and every trick."""

import contextlib
import io
import pickle
import random
import warnings

import pytest

from snapshot_scan.contents import Examination, of_bytes
from snapshot_scan.names import Name, judge_name
from snapshot_scan.pickles import Pickle
from tests.plugins.snapshot_scan.hostile_pickles import NAMES, TRICKS, UNLIKELY, called, headed, named, stacked


def scan(data, file="file.pkl", allow=()):
    """The findings in a content, as their verdicts by text."""
    examination = Examination(file, allow)
    examination.examine(of_bytes(data))
    return {each.text: each.verdict for each in examination.findings}


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_scan_finds_each_name_that_runs_code(module, name):
    for form in (named, stacked):
        assert scan(called(headed(form(module, name))))[f"calls {module}.{name}"] == "runs code"
        assert scan(headed(form(module, name) + b"."))[f"names {module}.{name}"] == "runs code"


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("file", ["file.pkl", "weights", "model.bin", "a/data/0"])
def test_scan_finds_each_trick_in_a_file_of_any_name(trick, file):
    assert "runs code" in scan(TRICKS[trick], file).values()


@pytest.mark.parametrize("trick", UNLIKELY)
def test_scan_finds_unlikely_tricks_in_a_file_that_is_named_as_a_pickle(trick):
    assert "runs code" in scan(UNLIKELY[trick]).values()
    assert "runs code" in scan(headed(UNLIKELY[trick]), "weights").values()


@pytest.mark.parametrize("protocol", range(6))
def test_scan_finds_nothing_in_plain_pickles(protocol):
    value = {"a": [1, 2.5, None, True, b"b", "ü" * 2000, (1, 2, 3, 4), {5}, frozenset([6]), 1 << 99, complex(1, 2)]}
    assert set(scan(pickle.dumps(value, protocol)).values()) <= {"harmless"}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("collections.OrderedDict", "harmless"), ("torch._utils._rebuild_tensor_v2", "harmless"),
        ("torch.FloatStorage", "harmless"), ("torch.float8_e4m3fn", "harmless"), ("builtins.set", "harmless"),
        ("numpy._core.multiarray._reconstruct", "harmless"), ("numpy.dtype", "harmless"),
        ("numpy.random._pickle.__generator_ctor", "harmless"),
        ("collections.OrderedDict.__init__.__globals__", "runs code"), ("torch.load", "runs code"),
        ("builtins.print", "runs code"), ("my.module.Class", "unknown"), ("torch.nn.modules.linear.Linear", "unknown"),
        ("xcollections.OrderedDict", "unknown"), ("collections.OrderedDict\n", "unknown"),
    ],
)  # fmt: skip
def test_scan_verdicts_of_names(name, verdict):
    module, _, last = name.rpartition(".")
    rule = judge_name(Name(module, last))
    assert {"known": "harmless", "code": "runs code"}.get(rule, rule) == verdict


def test_scan_of_a_call_of_an_unknown_function_is_that_it_runs_code():
    assert scan(headed(named("my.module", "Class") + b")\x81.")) == {"names my.module.Class": "unknown"}
    assert scan(called(headed(named("my.module", "make")))) == {"calls my.module.make": "runs code"}


def test_scan_allow_accepts_unknown_names_but_none_that_run_code():
    data = called(headed(named("my.module", "make")))
    assert scan(data, allow=["my.*"]) == {"calls my.module.make": "harmless"}
    assert scan(called(named("os", "system")), allow=["*"]) == {"calls os.system": "runs code"}


def test_scan_names_faults_and_what_was_not_examined():
    found = scan(headed(b"N0\xffmore"))
    assert found["unknown opcode 0xff"] == "unknown"
    assert found["4 bytes after a pickle"] == "not examined"
    assert scan(headed(b"NN")) == {"it ends too early": "unknown"}
    assert scan(headed(b"."))["it takes a value that is not there"] == "unknown"
    assert scan(headed(named("torch", "Tensor") + b"}b.")) == {
        "names torch.Tensor": "harmless", "it changes torch.Tensor itself": "unknown"
    }  # fmt: skip
    assert scan(b"not a pickle") == {"text, not a .pkl file": "not examined"}
    assert scan(b"\x89PNG\r\n\x1a\n\0", "model.pt") == {"image, not a .pt file": "not examined"}


def test_scan_of_random_tensors_in_an_old_torch_file_finds_nothing():
    old = b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"".join(pickle.dumps(each, 2) for each in (1001, {}, {}, []))
    chance = random.Random(1)
    for _ in range(60):
        data = chance.randbytes(3000)
        assert scan(old + data, "model.bin") == {}
        assert scan(data, "model.bin") == {}
        assert scan(data, "model/data/0") == {}


def test_scan_of_a_text_with_an_unknown_escape_warns_of_nothing():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert scan(b"S'\\.'\n0" + called(named("os", "system")))["calls os.system"] == "runs code"
    assert not seen


def test_scan_goes_on_after_a_fault_in_a_file_that_is_named_as_a_pickle():
    """An unpickler stops at the first instruction; other scanners do not."""
    data = pickle.REDUCE + called(named("os", "system"))
    for file in ("a.pkl", "a.pt", "a.bin", "a.data"):
        assert scan(data, file)["calls os.system"] == "runs code"
    assert scan(data, "weights") == {}
    assert scan(headed(data), "weights")["calls os.system"] == "runs code"


def test_scan_of_texts_that_begin_like_pickles_finds_nothing():
    for text in (
        b"cat\ndog\nmouse\n",
        b"import torch\nimport os\n",
        b"i\nthe\n",
        b"(a) first\n",
        b"Names\n",
        b"cmod\n\xf8\n",
    ):
        assert scan(text, "vocab.txt") == {}


def test_scan_ends_at_limits_and_says_so(monkeypatch):
    endless = headed(b"N" * 2000)
    found = Pickle()
    found.follow(io.BytesIO(endless), len(endless), 1000)
    assert (found.opcodes, found.limited) == (1001, True)
    monkeypatch.setattr("snapshot_scan.pickles.MOST_HELD", 500)
    assert scan(endless)["a pickle of more than 502 instructions"] == "not examined"
    monkeypatch.setattr("snapshot_scan.contents.MOST_FINDINGS", 50)
    many = scan(headed(b"".join(called(named("a", f"f{number}"), end=b"0") for number in range(100)) + b"N."))
    assert many["more than 50 findings"] == "not examined"
    assert len(many) == 51
    memo = headed(b"N" + b"".join(b"r" + number.to_bytes(4, "little") for number in range(100)) + b".")
    assert scan(memo) == {}


@pytest.mark.parametrize("limit", ["MOST_HELD", "MOST_TEXT"])
@pytest.mark.parametrize("file", ["a.pkl", "a.bin", "README.md"])
def test_scan_says_that_a_limit_was_reached_in_a_file_of_any_name(limit, file, monkeypatch):
    monkeypatch.setattr(f"snapshot_scan.pickles.{limit}", 500)
    padding = {"MOST_HELD": b"N" * 600, "MOST_TEXT": (b"X\x90\1\0\0" + b"x" * 400 + b"0") * 3}[limit]
    for data in (headed(padding + called(named("os", "system"))), padding + called(named("os", "system"))):
        assert "not examined" in scan(data, file).values()


class Recorded:
    """An unpickler with functions in place of all that a pickle names."""

    def find_class(self, module, name):
        self.found = {*getattr(self, "found", ()), (module, name)}
        return lambda *args, **named: "os"

    def persistent_load(self, reference):
        return reference


class InPython(Recorded, pickle._Unpickler):
    pass


class InC(Recorded, pickle.Unpickler):
    pass


@pytest.mark.parametrize("unpickler", [InPython, InC])
def test_scan_finds_all_names_that_an_unpickler_finds_in_random_instructions(unpickler):
    """No random sequence of instructions has a name that only the unpickler finds, headed or not."""
    pieces = [
        b"(", b"0", b"1", b"2", b"N", b"t", b"l", b"]", b"}", b")", b"a", b"e", b"s", b"u", b"\x85", b"\x86", b"\x87",
        b"R", b"b", b"o", b"\x81", b"\x92", b"\x93", b"\x94", b"h\0", b"h\1", b"q\0", b"q\1", b"g1\n", b"p0\n", b"K\5",
        b"\x8c\2os", b"\x8c\6system", b"Vmath\n", b"S'sin'\n", b"U\3abc", b"cmath\ncos\n", b"(imath\ntan\n", b"\x8f",
        b"\x90", b"\x91", b"I1\n", b"F1.5\n", b"L1L\n", b"G12345678", b"C\1x", b"\x80\4", b".",
    ]  # fmt: skip
    chance = random.Random(5)
    reached = 0
    for number in range(6000):
        head = b"\x80\4" if number % 2 else b""
        data = head + b"".join(chance.choices(pieces, k=chance.randrange(2, 14))) + b"."
        recorder = unpickler(io.BytesIO(data))
        with contextlib.suppress(Exception):  # most are broken
            recorder.load()
        names = getattr(recorder, "found", set())
        found = Pickle()
        found.follow(io.BytesIO(data), len(data))
        assert names <= {tuple(each) for each in found.names}, data
        reached += bool(names)
    assert reached > 300
