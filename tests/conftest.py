"""The tiers of the tests, and fixtures that all rooms share: ranks, servers, a warm interpreter.

`python -m pytest` runs the fast tier: all tests without a tier's mark (see `[tool:pytest]` in setup.cfg), and those
that smoke.txt names. If files or folders are named, all of their tests run: `python -m pytest tests/storage`.
`.ci/run` runs all tiers but those of nightly.txt.
"""

import contextlib
import gc
import os
import re
import signal
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from snapshot import TakeOptions, events
from tests.helpers.browser import browser  # noqa: F401 - a fixture
from tests.helpers.installed import install  # noqa: F401 - a fixture
from tests.helpers.rank_pool import Pool
from tests.helpers.servers import azurite, gcs, moto, nginx, proxy, sshd, webdav, weed  # noqa: F401 - fixtures
from tests.helpers.warm_interpreter import Warm

HERE = Path(__file__).parent
TIERS = "servers or ranks or deadly or libraries or device or bench or examples or slow or nightly"
FAST = f"smoke or not ({TIERS})"
OTHER_TIER = re.compile(rf"^pytestmark = .*\bmark\.({TIERS.replace(' or ', '|')})\b", re.MULTILINE)
"""A module all of whose tests are of another tier than the fast one."""


def read_names(file):
    """Return the lines of a list beside this module: a module, a function, or one of its cases or their beginning."""
    return frozenset(line for line in (HERE / file).read_text().splitlines() if line and line[0] != "#")


NIGHTLY, SLOW, SMOKE, COMBINED = map(read_names, ("nightly.txt", "slow.txt", "smoke.txt", "combined.txt"))
CASES = tuple(line for line in NIGHTLY if "[" in line)
SMOKING = {line.partition("::")[0] for line in SMOKE}
COLLECTED = pytest.StashKey[list[str]]()
"""Names of all tests, if all modules were collected."""
EXAMPLES = 25
"""Most examples of a random search in the fast tier."""
WITHOUT = frozenset(filter(None, os.environ.get("SNAPSHOT_TEST_WITHOUT", "").split(",")))
"""Plugins that are not there, whose tests are not collected: see deletable.py."""
TOP_IMPORT = re.compile(r"^(?:from|import) ([\w.]+)(?: import ([\w, ]+))?", re.MULTILINE)
SERVERS = {"browser", "moto", "weed", "gcs", "azurite", "nginx", "webdav", "sshd"}

# Random searches try the same examples in each run, unless SNAPSHOT_TEST_RANDOM is set, as in nightly runs. There, a
# failure prints how to repeat it. What such a run finds becomes an example of the test. No search has a time limit per
# example: a machine that is busy with something else is slow.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
PROFILE = "random" if os.environ.get("SNAPSHOT_TEST_RANDOM") else "fixed"
settings.load_profile(PROFILE)
if PROFILE == "fixed" and hasattr(providers, "is_local_module_file"):
    # Else it also tries the constants in all modules that this process has happened to import.
    providers.is_local_module_file = lambda _: False

# gcsfs reads this when it is imported. Without it, the first call to an emulator waits a minute for gRPC.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Tests name their credentials. No client asks the machine's metadata service for others.
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
# A shell starts background jobs with SIGINT ignored, and tests interrupt the processes that inherit it from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tiers, and processes that share the work

FIRST = (
    "distributed/test_silent_ranks.py",
    "plugins/snapshot_objectstore/test_s3_faults.py",
    "plugins/snapshot_trainers/",
    "interop/",
    "device/",
    "plugins/snapshot_objectstore/test_s3.py",
    "faults/",
    "distributed/",
    "test_examples.py",
    "plugins/snapshot_bench/",
    "hostile/",
)
"""Modules that take long begin first, so that no process ends alone with one: beginnings of their paths."""
WORKERS = 3
"""Processes that run the tests: one more than the cores of a small machine, since many tests wait."""


def pytest_configure(config):
    """Choose the fast tier if neither tests nor marks are named on the command line."""
    config.pluginmanager.register(Unneeded())
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    if not config.option.markexpr:
        config.option.markexpr = FAST
    # Each worker looks at other folders first, so that they compile the modules of a fresh clone together and not all
    # of them each. `pytest_collection_modifyitems` gives all workers one order.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput"):
        rooms = (each for each in (*HERE.iterdir(), *(HERE / "plugins").iterdir()) if (each / "__init__.py").exists())
        folders = sorted(str(each) for each in rooms if each.name != "plugins")
        folders = [each for each in folders if Path(each).name not in config.getini("norecursedirs")]
        modules = sorted(str(each) for each in HERE.glob("test_*.py"))
        number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        paths = [*folders, *modules, str(HERE.parent / "snapshot"), str(HERE.parent / "plugins")]
        paths = [each for each in paths if not needs_any(Path(each), WITHOUT)]
        first = len(paths) * number // count
        config.args = paths[first:] + paths[:first]


class Unneeded:
    """A plugin that does not import modules without a test: some import a whole framework."""

    def pytest_ignore_collect(self, collection_path, config):
        """Ignore helpers, modules of the library without a doctest, and in the fast tier those of another tier."""
        if collection_path.suffix != ".py":
            return None
        if HERE in collection_path.parents and not collection_path.name.startswith("test_"):
            return True
        text = collection_path.read_text()
        if needs_any(collection_path, WITHOUT):
            return True
        if HERE not in collection_path.parents:
            return True if ">>>" not in text else None
        if config.option.markexpr != FAST or collection_path.relative_to(HERE).as_posix() in SMOKING:
            return None
        return True if OTHER_TIER.search(text) else None


@cache
def needs_any(path, plugins):
    """Tell whether a module is in the folder of one of the plugins, imports one when it is imported, or is listed."""
    if not plugins:
        return False
    if plugins & set(path.parts) or path.relative_to(HERE.parent).as_posix().removeprefix("tests/") in COMBINED:
        return True
    for module, names in TOP_IMPORT.findall(path.read_text()) if path.suffix else ():
        parts = module.split(".")
        if plugins & set(parts):
            return True
        place = HERE.parent.joinpath(*parts)
        below = [
            place.with_suffix(".py"),
            *(place / f"{each.split()[0]}.py" for each in names.split(",") if each.strip()),
        ]
        if parts[0] == "tests" and any(each.exists() and needs_any(each, plugins) for each in below):
            return True
    return False


CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Note that a process of pytest-xdist has crashed, which it takes for a failure only within a test."""
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session):
    """Let a run with a crashed process fail."""
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, which would look at thousands of tests again and again, here and later."""
    gc.disable()
    found = yield
    gc.enable()
    gc.freeze()
    return found


def pytest_xdist_auto_num_workers(config):
    """Start no process for single modules, and several for folders."""
    if all("::" in each or each.endswith(".py") for each in config.args):
        return 0
    return max(WORKERS, min(len(os.sched_getaffinity(0)), 8))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Mark the tests that use servers or ranks, and put long modules in front. The order is that of the paths."""
    if config.option.markexpr != FAST and any(Path(each).resolve() == HERE for each in config.args):
        config.stash[COLLECTED] = [name_below(item) for item in items]
    if WITHOUT:
        items[:] = [each for each in items if not names_of(each) & COMBINED]
        if not os.environ.get("SNAPSHOT_TEST_RANDOM"):  # the other cases of a function use what its first one uses
            items[:] = {name_below(each).partition("[")[0]: each for each in reversed(items)}.values()
            items.reverse()
    for item in items:
        used = {*getattr(item, "fixturenames", ()), *_texts_in_parameters(item)}
        if used & SERVERS:
            item.add_marker("servers")
        if used & {*POOLS, "fresh_pool"}:
            item.add_marker("ranks")
        name, whole = name_below(item), names_of(item)
        if whole & SLOW:
            item.add_marker("slow")
        if whole & SMOKE:
            item.add_marker("smoke")
        if whole & NIGHTLY or name.startswith(CASES):
            item.add_marker("nightly")
        few = item.config.option.markexpr == FAST or os.environ.get("SNAPSHOT_TEST_FEW")
        if few and getattr(item.obj, "is_hypothesis_test", False):
            limit_examples(item.obj)

    def place(item):
        path = name_below(item)
        return next((i for i, first in enumerate(FIRST) if path.startswith(first)), len(FIRST))

    items.sort(key=lambda item: (place(item), str(item.path)))


def limit_examples(test):
    """Let a random search try few examples. The other tiers try all."""
    test = getattr(test, "__func__", test)
    given = test._hypothesis_internal_use_settings
    test._hypothesis_internal_use_settings = settings(given, max_examples=min(given.max_examples, EXAMPLES))


def name_below(item):
    """Return the name of a test below this folder, with its module; empty if it is elsewhere."""
    below = HERE in item.path.parents
    return item.path.relative_to(HERE).as_posix() + item.nodeid[item.nodeid.index("::") :] if below else ""


def names_of(item):
    """Return the names that a list may have for a test: its own, that of its function, and that of its module."""
    name = name_below(item)
    return {item.nodeid, name, name.partition("[")[0], name.partition("::")[0]}


def pytest_terminal_summary(terminalreporter):
    """List the skipped tests: how many for each reason."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.write_sep("=", "skipped, and why")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:4} {reason}")


def _texts_in_parameters(item):
    """Return the strings that a test was parametrized with: some name a fixture."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [each for each in parameters.values() if isinstance(each, str)]


# The warm interpreter


@pytest.fixture
def told():
    """Events, as they happen."""
    found = []
    events.add_handler(found.append)
    yield found
    events.remove_handler(found.append)


@pytest.fixture
def fresh_pool():
    """Return a function that makes pools, `fresh_pool(world, ...)`, whose ranks the test may kill or stop."""
    with contextlib.ExitStack() as stack:
        yield lambda world, **options: stack.enter_context(Pool(world, **options))


@pytest.fixture(scope="session")
def warm():
    """An interpreter that has imported torch, for scripts to be forked from."""
    warm = Warm()
    yield warm
    warm.close()


# Ranks

POOLS = {"two": 2, "three": 3, "four": 4}
SHARED = {}
"""The pools that all tests share."""


def shared(name):
    """A fixture: that many ranks, shared by all tests."""

    @pytest.fixture(scope="session", name=name)
    def ranks():
        from tests.helpers.rank_pool import Pool  # which few tests need

        with Pool(POOLS[name]) as pool:
            SHARED[name] = pool
            yield pool

    return ranks


two, three, four = map(shared, POOLS)


@pytest.fixture(autouse=True)
def mended(request):
    """Restart a shared pool that an earlier test left broken, or that was closed."""
    for name in POOLS.keys() & set(request.fixturenames):
        pool = request.getfixturevalue(name)
        if pool is SHARED.get(name) and not pool.healthy():  # a test may have its own pool by that name
            pool.restart()


def pytest_runtest_teardown(item, nextitem):
    """Close pools that the next test does not use: Gloo's threads poll as long as their group exists."""
    for name, pool in SHARED.items():
        if nextitem is None or (nextitem.path != item.path and name not in getattr(nextitem, "fixturenames", ())):
            pool.close()


# Small ones


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see."""
    return str(tmp_path)


@pytest.fixture
def one_thread():
    """Run torch with one thread: on a busy machine its threads wait for each other, and small tensors need none."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def writer_process(tmp_path_factory):
    """Start the writer process, which is kept with its channel and some shared memory."""
    import torch

    from snapshot import Snapshot, StateDict

    state = {"s": StateDict(x=torch.ones(1 << 20))}
    Snapshot.async_take(tmp_path_factory.mktemp("first") / "s", state, options=TakeOptions(worker="process")).wait()
