"""Hosts on one machine: network namespaces, each with a separate name and address, joined by a cable.

A host is a sleeping process in its namespaces; commands that run on the host enter them. The namespaces are unnamed, so
a killed test leaves nothing behind: they and the cable disappear with their last process.
"""

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.patience import patient

LIFETIME = 600
"""Seconds after which a host ends if the test does not end it, before `patient`."""
_NEEDS_USER_NAMESPACE = os.geteuid() != 0


@dataclass(frozen=True)
class Host:
    """A host that can reach only its peer."""

    name: str
    address: str
    pid: int

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command that runs `argv` on this host."""
        namespaces = ["--user", "--preserve-credentials"] if _NEEDS_USER_NAMESPACE else []
        return ["nsenter", "--target", str(self.pid), *namespaces, "--net", "--uts", "--", *map(str, argv)]

    def run(self, *argv: str) -> None:
        """Run a short command on this host."""
        subprocess.run(self.enter(argv), check=True, capture_output=True, text=True, timeout=patient(10))

    def unplug(self) -> None:
        """Disconnect the cable: no packet arrives any more, not even the end of a connection."""
        self.run("ip", "link", "set", "cable", "down")

    def kill(self) -> None:
        """Kill all processes of this host."""
        try:
            here = os.readlink(f"/proc/{self.pid}/ns/net")
        except FileNotFoundError:
            return
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and os.readlink(process / "ns" / "net") == here:
                    os.kill(int(process.name), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create `node-a` at 10.77.0.1 and `node-b` at 10.77.0.2, joined by a cable; their processes end with the block.

    Raises:
        OSError or subprocess.SubprocessError: this machine does not allow it.
    """
    sleepers: list[subprocess.Popen[str]] = []
    hosts: list[Host] = []
    try:
        for number, name in enumerate(("node-a", "node-b"), start=1):
            if not hosts:
                command = ["unshare", *(["--user", "--map-root-user"] if _NEEDS_USER_NAMESPACE else [])]
            else:
                # Both are in the first one's user namespace, so that a cable may join them.
                command = [*hosts[0].enter(()), "unshare"]
            sleep = f"hostname {name} && echo ready && exec sleep {patient(LIFETIME):g}"
            sleeper = subprocess.Popen(
                [*command, "--net", "--uts", "sh", "-c", sleep],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            sleepers.append(sleeper)
            assert sleeper.stdout is not None and sleeper.stderr is not None
            if sleeper.stdout.readline() != "ready\n":
                raise OSError(sleeper.stderr.read().strip())
            hosts.append(Host(name, f"10.77.0.{number}", sleeper.pid))
        first, second = hosts
        first.run("ip", "link", "add", "name", "cable", "type", "veth", "peer", "name", "end")
        first.run("ip", "link", "set", "end", "netns", str(second.pid), "name", "cable")
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
            host.run("ip", "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            host.kill()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()


@functools.cache
def why_no_hosts() -> str | None:
    """Return why hosts cannot be created on this machine, or None if they can."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}"
