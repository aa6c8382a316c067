"""A cable that takes time: what one of its ends sends, the other end receives some milliseconds later.

    python delay_line.py port0 far0      # ``network.py`` starts it in the namespace of the bridge

It makes two interfaces, and carries every frame between them. Each line that it reads is a number of seconds, by which frames are
late from then on. It ends with its standard input.

Linux has a queueing discipline for that, netem, without which many kernels are built. TAP interfaces are in all of them. Frames
of 64 KB, as large as those that TCP gives to a veth interface, keep the work per byte small.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import sys
import time

FRAME_BYTES = 1 << 16
"""At most this many bytes are in a frame, its header included."""

MTU = 65_000


def run(names: tuple[str, str]) -> None:
    """Make the interfaces, say so, and carry frames until the standard input ends."""
    one, two = (_make_interface(name) for name in names)
    far_end = {one: two, two: one}
    print("ready", flush=True)
    delay_s = 0.0
    # When a frame arrives, where, and the frame. All are equally late, so the first that was sent is the first to arrive.
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([sys.stdin, one, two], [], [], wait_s)
        for source in ready:
            if source is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                delay_s = float(line)
                on_the_way.clear()  # frames of a longer delay would hold up those of a shorter one. TCP sends them again
            else:
                on_the_way.append((time.monotonic() + delay_s, far_end[source], os.read(source, FRAME_BYTES)))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, target, frame = on_the_way.popleft()
            try:
                os.write(target, frame)
            except OSError:  # an interface that is down takes no frames, as on every network
                pass


def _make_interface(name: str) -> int:
    """Make a TAP interface in this process's network namespace, and return the file that its frames go through."""
    TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a delay ends on time, also where ranks use every core
    run((sys.argv[1], sys.argv[2]))
