import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
STYLE = TESTS / "style"

# Test modules import helpers by name, and so do the ranks that helpers/harness.py starts.
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS)]

from thorough import is_thorough, patterns_without_tests  # noqa: E402

# Files whose tests start no group of several ranks. The rest runs one test at a time, in one process, also where xdist runs two
# processes: gloo takes any connection to a port of its own for its peer's, and ranks that a test has killed leave others that
# go on connecting.
ONE_RANK = (
    "test_check.py",
    "test_config.py",
    "estimate/test_step_",
    "estimate/test_validation.py",
    "fsdp/test_happens_before.py",
    "fsdp/test_pending_model.py",
    "fuzz/test_programs.py",
    "ops/",
    "zoo/test_forms.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Also run the tests of tests/thorough.py.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave `style/` to scripts/check.sh, which runs once in the suite, unless a command names it."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return True if collection_path == STYLE and not any(path.is_relative_to(STYLE) for path in named) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, or what the machine cannot run, and say so."""
    # A command that names files or folders runs all that is in them.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        if not config.getoption("--all"):
            left_out = [item for item in items if is_thorough(item.nodeid)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not is_thorough(item.nodeid)]
        elif unknown := patterns_without_tests([item.nodeid for item in items]):
            raise pytest.UsageError(f"tests/thorough.py names no test by {', '.join(unknown)}")
    # xdist gives the first file to one process and the second to the other. The check takes longest of what is no rank's.
    items.sort(key=lambda item: (item.path.name != "test_check.py", not _starts_ranks(item.nodeid)))
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="no vLLM: `bash scripts/test_vllm.sh` installs it and runs these"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("long") and "long" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="long: run it with `-m long`"))


def _starts_ranks(nodeid: str) -> bool:
    return not nodeid.removeprefix("tests/").startswith(ONE_RANK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests that start ranks to one process, and the others, file by file, to who has nothing to do."""
    from xdist.scheduler import LoadScopeScheduling

    class TwoProcesses(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if _starts_ranks(nodeid) else nodeid.partition("::")[0]

    return TwoProcesses(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell the scenarios that share one start of ranks which of them this run has selected."""
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
