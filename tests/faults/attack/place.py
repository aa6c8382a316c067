"""Private disks for faults, and what a run left behind.

The campaign runs in mount and PID namespaces of its own, with its own folder for temporary files and its own ``/dev/shm``.
So it can fill disks, what lies in ``/dev/shm`` is from its own runs, and nothing of it outlives it, even if it is
killed itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHM = "/dev/shm"
FILLER = ".filler"
"""A file that takes all space of a disk."""
MARK = "ZEROPP_FAULTS_INSIDE"
DISK_SIZE = "24m"
SHM_SIZE = "64m"
SETTLE_S = 5.0  # for processes that are at their exit


def why_impossible() -> str | None:
    """Say why this machine has no private namespaces, by trying it; None where it has them."""
    if sys.platform != "linux":
        return "this is not Linux"
    if missing := [tool for tool in ("unshare", "mount", "setpriv") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found: install util-linux"
    trial = subprocess.run([*_unshare(), "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True)
    if trial.returncode == 0:
        return None
    return f"the kernel refuses mounts ({trial.stderr.strip()}): run as root, or allow user namespaces"


def enter_namespaces() -> None:
    """Start this program again inside and exit with its status; inside, make the private file systems and return.

    Raises:
        SystemExit: the program inside has ended, or this machine has no private namespaces.
    """
    if own := os.environ.get(MARK):
        for folder, size in ((own, "2g"), (SHM, SHM_SIZE)):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        return
    if reason := why_impossible():
        raise SystemExit(f"No faults on this machine: {reason}")
    # Not over ``/tmp`` itself, where the clone may be.
    with tempfile.TemporaryDirectory(prefix="faults_") as own:
        environment = os.environ | {MARK: own, "TMPDIR": own}
        raise SystemExit(subprocess.run([*_unshare(), sys.executable, *sys.argv], env=environment).returncode)


def _unshare() -> list[str]:
    # ``--kill-child`` covers the end of ``unshare``, and ``setpriv`` the end of this program.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig", "KILL", *inside]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system of its own at ``folder``, which is made."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def heal(disk: Path) -> None:
    """Undo what a blow did to the disks, as the person who runs the job would before starting it again."""
    for folder in (disk, Path(SHM)):
        (folder / FILLER).unlink(missing_ok=True)


def shared_memory_files() -> set[str]:
    """Return the names in ``/dev/shm``, without semaphores of Python: its resource tracker removes these at the end."""
    return {name for name in os.listdir(SHM) if name != FILLER and not name.startswith("sem.mp-")}


def processes_left(groups: set[int]) -> list[str]:
    """Return processes of these process groups that are alive after a moment."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _members(groups)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _members(groups: set[int]) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name of a process may hold spaces. State, parent and group follow it.
            name, _, rest = stat.read_text().rpartition(")")
            state, _, group = rest.split()[:3]
            if int(group) in groups and state != "Z":
                found.append(f"process {name})")
    return found


def temporary_files(folder: Path) -> list[str]:
    """Return what lies in a run's own folder for temporary files, and half-written files and folders on its disk."""
    partial = [
        path for path in (folder / "disk").rglob("*") if path.name.startswith(".partial") or path.suffix == ".tmp"
    ]
    return sorted(str(path.relative_to(folder)) for path in [*(folder / "tmp").iterdir(), *partial])
