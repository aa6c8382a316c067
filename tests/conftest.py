import fnmatch
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
STYLE = TESTS / "style"

# Test modules import helpers by name, and so do the ranks that helpers/harness.py starts. The fuzz has some of them.
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS), str(TESTS / "fuzz")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Also run the tests that are marked `thorough`.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave `style/` to scripts/check.sh, which runs once in the suite, unless a command names it."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return True if collection_path == STYLE and not any(path.is_relative_to(STYLE) for path in named) else None


@pytest.hookimpl(tryfirst=True)  # xdist's hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, or what the machine cannot run, and say so."""
    # A command that names files or folders runs all that is in them.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        if unknown := patterns_without_tests(items):
            raise pytest.UsageError(f"the mark `thorough` names no test by {', '.join(unknown)}")
        if not config.getoption("--all"):
            config.hook.pytest_deselected(items=[item for item in items if is_thorough(item)])
            items[:] = [item for item in items if not is_thorough(item)]
    # xdist gives the first group to one process and the second to the other. The check takes longest of what is no rank's.
    items.sort(key=lambda item: (item.path.name != "test_check.py", not starts_ranks(item)))
    # gloo takes any connection to a port of its own for its peer's, and ranks that a test has killed leave others that go on
    # connecting. So all tests that start ranks are one group, for one process.
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ranks" if starts_ranks(item) else item.path.name))
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="no vLLM: `bash scripts/test_vllm.sh` installs it and runs these"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("long") and "long" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="long: run it with `-m long`"))


def starts_ranks(item: pytest.Item) -> bool:
    """Return whether a test starts a group of several ranks."""
    return item.get_closest_marker("one_rank") is None


def is_thorough(item: pytest.Item) -> bool:
    """Return whether a test is left to ``--all``: it is marked ``thorough``, or its parameters are those that the mark names."""
    return any(
        not patterns or any(fnmatch.fnmatchcase(id_of(item), each) for each in patterns) for patterns in marks_of(item)
    )


def marks_of(item: pytest.Item) -> Iterator[Sequence[str]]:
    """Iterate over the patterns of each mark ``thorough`` of a test. One without patterns means all of its parameters."""
    return (mark.args for mark in item.iter_markers("thorough"))


def id_of(item: pytest.Item) -> str:
    """Return the id of a test's parameters."""
    return getattr(getattr(item, "callspec", None), "id", "")


def patterns_without_tests(items: Sequence[pytest.Item]) -> list[str]:
    """Return the patterns of marks that name no parameters of their test."""
    ids: dict[str, list[str]] = defaultdict(list)
    for item in items:
        ids[item.nodeid.partition("[")[0]].append(id_of(item))
    named = {
        (name, pattern)
        for item in items
        for mark in marks_of(item)
        for pattern in mark
        for name in [item.nodeid.partition("[")[0]]
    }
    return sorted(f"{name}: {pattern}" for name, pattern in named if not fnmatch.filter(ids[name], pattern))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make sure that xdist has read the groups, and tell scenarios that share a start of ranks which of them are selected."""
    if session.config.getoption("loadgroup", False):  # in a process of xdist's
        without = [item.nodeid for item in session.items if "@" not in item.nodeid]
        assert not without, (
            f"xdist does not know the group of {without[0]}: see the versions in pyproject.toml's test extra"
        )
    for item in session.items:
        if scenarios := getattr(getattr(item, "function", None), "scenarios", None):
            parameters = item.callspec.params
            of_way = scenarios[parameters["way"]] if isinstance(scenarios, dict) else scenarios
            of_way.select(parameters["scenario"])


@pytest.fixture(scope="module")
def one_thread():
    """For tests on tensors so small that threads slow them down where others use the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def restore_kernels():
    """For tests that set kernels."""
    from hf_zeropp import ops

    name = ops.kernel_info().cpu
    yield
    ops.set_kernels(name)
