"""A link of known bandwidth between two ranks of one machine: namespaces, veth and tc.

Two network namespaces, each with a host name and a /dev/shm of its own, are joined by a pair of
virtual interfaces whose rate `tc` limits. MPI takes them for two hosts and uses TCP between them.
It needs root, and the programs `ip`, `tc` and `unshare` (Debian: iproute2, util-linux).
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.213.77"
HOSTS = ("link-a", "link-b")
# The programs of a host: its own name, memory and list of hosts.
AS_HOST = (
    'hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts && shift 2 '
    '&& exec "$@"'
)


class Link:
    """A link between two hosts on this machine; use it as a context.

    Args:
        gigabits: rate in Gbit/s in each direction.
        delay: one way, in milliseconds.
    """

    def __init__(self, gigabits: float, delay: float = 0.0) -> None:
        self.gigabits, self.delay = gigabits, delay
        self.spaces = [f"hvdtrain-{os.getpid()}-{host}" for host in HOSTS]
        self.folder = Path()

    def __enter__(self) -> "Link":
        if os.getuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
            sys.exit("a slow link needs root, and the programs ip, tc and unshare")
        self.folder = Path(tempfile.mkdtemp())
        lines = [f"{NETWORK}.{i + 1} {host}" for i, host in enumerate(HOSTS)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        agent = self.folder / "agent"
        words = shlex.join(self.on(1, ["sh", "-c"]))
        # The launcher calls it as it would call ssh: with a host and a command line.
        agent.write_text(f'#!/bin/sh\nshift\nexec {words} "$*"\n')
        agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> None:
        for space in self.spaces:
            _ip("netns", "add", space)
        _ip("link", "add", "end0", "netns", self.spaces[0], "type", "veth",
            "peer", "name", "end1", "netns", self.spaces[1])  # fmt: skip
        for i, space in enumerate(self.spaces):
            within = ("-n", space)
            _ip(*within, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", f"end{i}")
            _ip(*within, "link", "set", f"end{i}", "up")
            _ip(*within, "link", "set", "lo", "up")
            # A burst of a few milliseconds: less would slow the link below its rate.
            burst = max(64_000, int(self.gigabits * 1e9 / 8 * 0.004))
            _run("tc", "-n", space, "qdisc", "add", "dev", f"end{i}", "root", "handle", "1:",
                 "tbf", "rate", f"{self.gigabits * 1000:g}mbit", "burst", str(burst),
                 "latency", "200ms")  # fmt: skip
            if self.delay:
                _run("tc", "-n", space, "qdisc", "add", "dev", f"end{i}", "parent", "1:",
                     "netem", "delay", f"{self.delay:g}ms", "limit", "100000")  # fmt: skip

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` on host 0 or 1."""
        space = ["ip", "netns", "exec", self.spaces[host]]
        apart = ["unshare", "--uts", "--mount", "--propagation", "private"]
        hosts = str(self.folder / "hosts")
        return [*space, *apart, "sh", "-c", AS_HOST, "sh", HOSTS[host], hosts, *command]

    def mpirun(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` on one rank of each host."""
        from hvdtrain.launch import own_mpirun

        launcher = own_mpirun() or shutil.which("mpirun") or "mpirun"
        options = f"-np 2 --host {HOSTS[0]}:1,{HOSTS[1]}:1 --bind-to none"
        options += f" --prtemca plm_ssh_agent {self.folder / 'agent'}"
        options += f" --mca btl_tcp_if_include {NETWORK}.0/24"
        options += f" --prtemca prte_if_include {NETWORK}.0/24"
        return self.on(0, [launcher, *options.split(), *command])

    def sent_bytes(self) -> int:
        """Return the bytes that host 0 has sent so far, with the headers of all layers."""
        shown = ["ip", "netns", "exec", self.spaces[0], "cat", "/sys/class/net/end0/statistics/"]
        shown[-1] += "tx_bytes"
        done = subprocess.run(shown, capture_output=True, text=True, check=True)
        return int(done.stdout)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()}")
