"""Private namespaces for a program that emulates a cluster, so that nothing of the cluster outlives the program.

[Note: nothing is left behind]
An emulated cluster consists of processes, network interfaces and named network namespaces. A program that removes them
by itself fails to do so in the one case that matters: when it is killed with SIGKILL. ``enter_sandbox`` therefore starts
the whole program a second time, with ``unshare``, in namespaces of its own:

- a PID namespace: when its first process ends, for whatever reason, the kernel kills all processes in it;
- a network namespace: the kernel frees its interfaces with the last process in it. The interfaces of the machine are not
  visible from inside and cannot be changed by mistake;
- a mount namespace: ``ip netns`` keeps the names of network namespaces as files in ``/run/netns``, and ``/run`` is a
  tmpfs that only the sandbox sees.

Root may make these namespaces everywhere. Other users need user namespaces, which some machines forbid.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

SANDBOX_MARK = "CLUSTER_SANDBOX"
"""The environment variable that tells the second start of the program that it is inside."""


def why_impossible() -> str | None:
    """Say why this machine cannot run an emulated cluster, by trying it, which takes milliseconds.

    Returns:
        The reason and its remedy, or None where a cluster can run.
    """
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux."
    probe = "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add v0 type veth peer name v1 netns probe"
    trial = subprocess.run([*_unshare(), "sh", "-c", probe], capture_output=True, text=True)
    if trial.returncode == 0:
        return None
    reason = (trial.stderr.strip().splitlines() or ["unknown"])[-1]
    return f"the kernel refuses network namespaces ({reason}): run as root, or allow user namespaces."


def enter_sandbox() -> None:
    """Make sure that the rest of the program runs in private namespaces: see [Note: nothing is left behind].

    The first call starts the program again inside, waits for it and exits with its status. The call inside returns.
    Call it before anything costly: whatever ran before it runs twice.

    Raises:
        SystemExit: the program inside has ended, or this machine cannot run an emulated cluster.
    """
    if os.environ.get(SANDBOX_MARK):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # a new network namespace starts without loopback
        return
    if reason := why_impossible():
        raise SystemExit(f"No emulated cluster on this machine: {reason}")
    sys.stdout.flush()  # or what is buffered here would appear after the output from inside
    command = [*_unshare(), sys.executable, *sys.argv]
    inside = subprocess.Popen(command, env=os.environ | {SANDBOX_MARK: "1"}, preexec_fn=_die_with_parent)
    # A terminal sends Ctrl-C to both processes. The one inside ends in an orderly way, and this one waits for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # ``unshare`` ignores SIGTERM, so it is not passed on as it is.
    signal.signal(signal.SIGTERM, lambda *_: inside.kill())
    # A shell reports a program that was killed by signal n as 128 + n.
    status = inside.wait()
    raise SystemExit(status if status >= 0 else 128 - status)


def _die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends, however the parent ends."""
    # ``--kill-child`` of ``unshare`` covers the end of ``unshare``; this covers the end of the program that started it.
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _unshare() -> list[str]:
    """Return the command prefix that starts a program in mount, PID and network namespaces of its own.

    ``--kill-child`` makes the kernel kill the program when ``unshare`` ends; ``--mount-proc`` gives it a ``/proc`` that
    shows its own processes.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
