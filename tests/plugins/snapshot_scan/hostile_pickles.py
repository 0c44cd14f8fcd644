"""Hostile pickles, instruction by instruction: the names and the tricks that public scanners are tested with."""

import pickle
import struct

MARKER = "ran"
"""The file that a pickle of this module would create."""
CODE = f"open({MARKER!r}, 'w').close()"
SHELL = f"touch {MARKER}"

DANGEROUS = """
__builtin__ apply|__builtin__ compile|__builtin__ eval|__builtin__ exec|__builtin__ getattr|__builtin__ globals
__builtin__ open|builtins __import__|builtins breakpoint|builtins eval|builtins eval.__call__|builtins exec
builtins getattr|builtins open|_aix_support _read_cmd_output|_io FileIO|_operator attrgetter|_operator itemgetter
_operator methodcaller|_osx_support _read_output|_pickle loads|_pyrepl.pager pipe_pager|aiohttp.client ClientSession
asyncio.unix_events _UnixSubprocessTransport._start|bdb Bdb|bdb Bdb.run|cProfile run|cProfile runctx
cloudpickle.cloudpickle _builtin_type|cloudpickle.cloudpickle _function_setstate|cloudpickle.cloudpickle _make_cell
cloudpickle.cloudpickle _make_empty_cell|cloudpickle.cloudpickle _make_function|cloudpickle.cloudpickle subimport
code InteractiveInterpreter.runcode|commands getoutput|ctypes CDLL|distutils.file_util write_file
doctest debug_script|ensurepip _run_pip|functools partial|httplib HTTPSConnection|http.client HTTPSConnection
idlelib.autocomplete AutoComplete.fetch_completions|idlelib.autocomplete AutoComplete.get_entity
idlelib.calltip Calltip.fetch_tip|idlelib.calltip get_entity|idlelib.debugobj ObjectTreeItem.SetText
idlelib.pyshell ModifiedInterpreter.runcode|idlelib.pyshell ModifiedInterpreter.runcommand
idlelib.run Executive.runcode|imaplib IMAP4_stream|lib2to3.pgen2.grammar Grammar.loads
lib2to3.pgen2.pgen ParserGenerator.make_label|logging FileHandler|nt system|numpy.f2py.crackfortran getlincoef
numpy.testing._private.utils runstring|operator attrgetter|operator itemgetter|operator methodcaller|os system
pdb run|pickle loads|pip main|pkgutil resolve_name|posix system|profile Profile.run|profile Profile.runctx
profile run|pty spawn|pydoc locate|pydoc pipepager|requests.api get|runpy _run_code|shutil rmtree
socket create_connection|ssl get_server_certificate|subprocess run|sys exit|sys modules
test.support.script_helper assert_python_ok|timeit timeit|torch._dynamo.guards GuardBuilder.get
torch._inductor.codecache compile_file|torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_guards_expression
torch.jit.unsupported_tensor_ops execWrapper|torch.serialization load
torch.utils._config_module ConfigModule.load_config
torch.utils.bottleneck.__main__ run_autograd_prof|torch.utils.bottleneck.__main__ run_cprofile
torch.utils.collect_env run|torch.utils.collect_env run_and_read_all
torch.utils.data.datapipes.utils.decoder basichandlers|trace Trace.run|trace Trace.runctx|types CodeType
urllib.request urlopen|uuid _get_command_stdout|venv create|webbrowser open
torch os.system|torch.storage sys.modules|collections abc.sys.modules|joblib load|pandas read_pickle|numpy load
""".replace("\n", "|")
NAMES = [tuple(each.split()) for each in DANGEROUS.split("|") if each]


def text(value):
    """SHORT_BINUNICODE."""
    data = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data


def named(module, name):
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def stacked(module, name):
    return text(module) + text(name) + pickle.STACK_GLOBAL


def called(function, argument=SHELL, end=pickle.STOP):
    return function + text(argument) + pickle.TUPLE1 + pickle.REDUCE + end


def headed(body, protocol=4):
    return pickle.PROTO + bytes([protocol]) + body


def old(value):
    return pickle.UNICODE + value.encode() + b"\n"


SYSTEM = called(named("os", "system"))
STACKED = called(stacked("posix", "system"))
PUT, GET, POP = pickle.PUT, pickle.GET, pickle.POP

LONG = b"os\n" + b"path.os." * 80 + b"system\n"

TRICKS = {
    "GLOBAL": SYSTEM,
    "numbers with a NUL": headed(
        text("posix") + PUT + b"1\0\n0" + text("collections") + PUT + b"3\0\n0" + GET + b"1\0\n" + text("system")
        + PUT + b"2\0\n0" + text("OrderedDict") + PUT + b"4\0\n0" + GET + b"2\0\n" + called(pickle.STACK_GLOBAL)
    ),
    "a number with a NUL and one without": b"Nq\0" + PUT + b"1\0\n0h\1" + SYSTEM,
    "a long name": headed(called(b"c" + LONG), 4),
    "a very long name": headed(called(b"cos\n" + b"path.os." * 9000 + b"system\n"), 4),
    "a long name of INST": b"(S'touch ran'\ni" + LONG + b".",
    "a long name of STACK_GLOBAL": (
        b"N0" + headed(text("os") + b"X" + struct.pack("<I", 4806) + b"path.os." * 600 + b"system" + called(b"\x93"))
    ),
    "a module with a hyphen": b"cmy-evil\nrun\n)R.",
    "STACK_GLOBAL": headed(STACKED),
    "protocol 0": b"cposix\nsystem\np0\n(Vtouch ran\np1\ntp2\nRp3\n.",
    "INST": b"(S'touch ran'\niposix\nsystem\n.",
    "OBJ": b"(" + named("os", "system") + text(SHELL) + b"o.",
    "NEWOBJ": headed(named("subprocess", "Popen") + text(SHELL) + pickle.TUPLE1 + pickle.NEWOBJ + b"."),
    "NEWOBJ_EX": headed(named("subprocess", "Popen") + text(SHELL) + pickle.TUPLE1 + b"}" + pickle.NEWOBJ_EX + b"."),
    "BUILD": headed(named("os", "system") + b"N" + pickle.BUILD + b"."),
    "memo of protocol 0": (
        old("os") + PUT + b"2\n" + POP + old("system") + PUT + b"3\n" + POP + old("torch") + PUT + b"0\n" + POP
        + old("LongStorage") + PUT + b"1\n" + POP + GET + b"2\n" + GET + b"3\n" + called(pickle.STACK_GLOBAL)
    ),
    "places in the memo": (
        old("os") + PUT + b" 07\n" + text("system") + pickle.LONG_BINPUT + struct.pack("<I", 1 << 20) + b"00"
        + GET + b"7\n" + pickle.LONG_BINGET + struct.pack("<I", 1 << 20) + called(pickle.STACK_GLOBAL)
    ),
    "MEMOIZE": headed(
        text("os") + pickle.MEMOIZE + text("system") + pickle.MEMOIZE + b"00h\0h\1" + called(pickle.STACK_GLOBAL)
    ),
    "MEMOIZE after PUT": headed(
        text("os") + b"q\x05" + pickle.MEMOIZE + text("system") + pickle.MEMOIZE + b"00h\1h\2"
        + called(pickle.STACK_GLOBAL)
    ),
    "DUP": headed(text("os") + pickle.DUP + pickle.STACK_GLOBAL + b"0" + STACKED),
    "a mark that is popped": b"(0(N1" + SYSTEM,
    "quoted strings": b"S'os'\nS'system'\n\x93S'touch ran'\n\x85R.",
    "escaped strings": b"S'\\x6fs'\nV\\u0073ystem\n\x93S'touch ran'\n\x85R.",
    "binary strings": b"U\x02osT\x06\0\0\0system\x93" + text(SHELL) + b"\x85R.",
    "long strings": (
        pickle.BINUNICODE8 + struct.pack("<Q", 2) + b"os" + pickle.BINUNICODE + struct.pack("<I", 6) + b"system\x93"
        + text(SHELL) + b"\x85R."
    ),
    "protocols in the middle": pickle.PROTO + b"\2N0" + pickle.PROTO + b"\4" + SYSTEM,
    "frames of wrong lengths": headed(pickle.FRAME + struct.pack("<Q", 1) + SYSTEM),
    "a name in another": called(headed(stacked("builtins", "eval.__call__")), CODE),
    "names of Python 2": called(named("__builtin__", "eval"), CODE),
    "getattr": headed(
        stacked("builtins", "getattr") + named("os", "sys") + text("modules") + pickle.TUPLE2 + pickle.REDUCE + b"."
    ),
    "the result of a call": called(
        headed(stacked("torch._utils", "_rebuild_tensor")) + pickle.EMPTY_TUPLE + pickle.REDUCE
    ),
    "a computed name": headed(
        stacked("_codecs", "encode") + text("os") + pickle.TUPLE1 + pickle.REDUCE + text("system") + b"\x93)R."
    ),
    "a name that is not ASCII": called(named("\uff4f\uff53", "system")),
    "a long text before": headed(pickle.BINUNICODE + struct.pack("<I", 5000) + b"x" * 5000 + b"0" + STACKED),
    "a long line before": b"V" + b"x" * 5000 + b"\n0" + SYSTEM,
    "a pickle in a pickle": headed(
        named("pickle", "loads") + pickle.SHORT_BINBYTES + bytes([len(SYSTEM)]) + SYSTEM + pickle.TUPLE1 + b"R."
    ),
    "the second pickle": pickle.dumps(["a"]) + headed(STACKED),
    "the second pickle of protocol 0": b"(lp0\nVa\np1\na." + SYSTEM,
    "a pickle after garbage": pickle.dumps(["a"]) + b"\xff\xfe garbage \0" + headed(STACKED),
    "bytes after it": SYSTEM + b"\n\n\t\t",
    "no end": called(named("os", "system"), end=b""),
    "an unknown opcode after a call": headed(called(named("os", "system"), end=b"\xff.")),
    "a broken text after a call": b"cbuiltins\nexec\n(X>\0\0\0f = open('my_file.txt', 'a')tRX.",
    "a place that was not stored": headed(
        called(named("os", "system"), end=b"0") + text("os") + pickle.MEMOIZE + b"h\3h\0" + pickle.STACK_GLOBAL + b"."
    ),
    "a number as a module": headed(
        called(named("os", "system"), end=b"0") + b"J\x2a\0\0\0" + pickle.MEMOIZE + text("os") + pickle.MEMOIZE
        + b"h\0h\1" + pickle.STACK_GLOBAL + b"."
    ),
    "the number of old torch files": (
        called(headed(named("__builtin__", "eval"), 2), "0x1950A86A20F9469CFC6C")
        + b"".join(pickle.dumps(each, 2) for each in (1001, {}, [])) + SYSTEM
    ),
    "a pickle after an old torch file": (
        b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
        + b"".join(pickle.dumps(each, 2) for each in (1001, {}, {}, [])) + b"\0" * 99 + headed(STACKED)
    ),
    "apply of Python 2": (
        b"c__builtin__\nglobals\n(tRp100\n0c__builtin__\ncompile\n(S'x=1'\nS''\nS'exec'\ntRp101\n0c__builtin__\neval\n"
        b"(g101\ng100\ntRp102\n0c__builtin__\ngetattr\n(c__builtin__\ndict\nS'get'\ntRp103\n0c__builtin__\napply\n"
        b"(g103\n(g100\nS'x'\nltRp104\n0g104\n."
    ),
    "attrgetter": headed(
        called(stacked("operator", "attrgetter"), "system", b"") + called(stacked("builtins", "__import__"), "os", b"")
        + pickle.TUPLE1 + pickle.REDUCE + text(SHELL) + pickle.TUPLE1 + b"R."
    ),
    "after the bytes of an array": (
        headed(named("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81}b") + b"\x0b\0\xff" * 100 + STACKED
    ),
    "after the bytes of an array, in protocol 2": (
        headed(named("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81}b", 2) + b"\x0b\0\xff" * 100 + SYSTEM
    ),
    "safetensors at the same time": b"X\x10\0\0\0\0\0\0{" + b" " * 12 + SYSTEM + b" " * 0x1100,
    "an image at the same time": b"GIF8aaaaa0" + SYSTEM,
    "a model at the same time": b"GGUFaaaaa0" + SYSTEM,
}  # fmt: skip
"""Pickles that run code, or that stop a reader that is not careful."""
UNLIKELY = {
    "extension 1": called(pickle.EXT1 + b"\5"),
    "extension 2": called(pickle.EXT2 + b"\5\1"),
    "extension 4": called(pickle.EXT4 + b"\5\1\0\0"),
    "a name that is not UTF-8": called(b"co\xff\nsystem\n"),
}
"""Pickles that no unpickler runs by default, and that look like random bytes."""
