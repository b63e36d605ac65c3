"""Hosts made of namespaces behave as hosts do, and leave nothing behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import network_hosts
import pytest
from network_hosts import NetworkHosts

ROOT = Path(__file__).parents[2]
RATE_MBIT = 400
MIB = 1 << 20

pytestmark = pytest.mark.timeout(60)

# Sends, or takes in, so many MiB over one connection.
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
for _ in range(int(sys.argv[3])): connection.sendall(bytes(1 << 20))
"""
SERVE = """
import socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
while data := connection.recv(1 << 20): print(len(data), flush=True)
"""


def serve(host):
    """A process on the host that takes a connection and prints the size of what arrives; its port."""
    server = host.start([sys.executable, "-u", "-c", SERVE], stdout=subprocess.PIPE, text=True)
    return server, int(server.stdout.readline())


def received(server):
    """(bytes, seconds from the first to the last) of what a server takes in until the connection ends."""
    total = int(server.stdout.readline())
    began = time.monotonic()
    total += sum(int(line) for line in server.stdout)
    return total, time.monotonic() - began


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_rates_hold_in_both_directions_when_one_host_alone_is_limited(make_hosts, sender, receiver):
    hosts = make_hosts(2)
    hosts[0].limit(RATE_MBIT)
    server, port = serve(hosts[receiver])
    hosts[sender].start([sys.executable, "-c", SEND, f"host-{receiver}", port, 64])
    nbytes, seconds = received(server)
    assert nbytes == 64 * MIB
    assert nbytes * 8 / seconds / 1e6 < 1.2 * RATE_MBIT  # slower is a busy machine's right


def test_a_link_that_is_down_stops_the_traffic_and_goes_on_when_it_is_up_again(make_hosts):
    hosts = make_hosts(3, rate_mbit=RATE_MBIT)
    server, port = serve(hosts[1])
    hosts[0].start([sys.executable, "-c", SEND, hosts[1].address, port, 32])
    total = int(server.stdout.readline())
    hosts[1].set_link(up=False)
    drained, limit = 0.0, time.monotonic() + 10
    while drained < 0.5 and time.monotonic() < limit:  # what had arrived is still read; then nothing comes
        began = time.monotonic()
        if select.select([server.stdout], [], [], 0.5)[0]:
            total += int(server.stdout.readline())
        drained = time.monotonic() - began
    assert total < 32 * MIB, "all of it came although the link was down"
    with pytest.raises(RuntimeError, match="host-1"):
        hosts[2].run([sys.executable, "-c", SEND.replace("10", "0.5"), "host-1", port, 1])
    hosts[1].set_link(up=True)
    total += received(server)[0]
    assert total == 32 * MIB


def test_hosts_have_names_addresses_and_shared_memory_of_their_own(make_hosts):
    hosts = make_hosts(2)
    name = f"laminar-test-{os.getpid()}"
    tell = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    for host in hosts:
        assert host.run([sys.executable, "-c", tell]).split() == [host.name, host.address]
        host.run(["sh", "-c", f"echo {host.name} > /dev/shm/{name}"])
    for host in hosts:
        assert (host.shared_memory / name).read_text() == f"{host.name}\n"
    assert not Path("/dev/shm", name).exists()
    assert socket.gethostname() not in [host.name for host in hosts]
    assert hosts[0].run(["pwd"]).strip() == os.getcwd()


def test_this_process_is_reached_from_the_hosts(make_hosts):
    hosts = make_hosts(1)
    with socket.create_server((hosts.address, 0)) as listener:
        hosts[0].run([sys.executable, "-c", SEND, hosts.address, listener.getsockname()[1], 0])
        connection, (address, _) = listener.accept()
        connection.close()
    assert address == hosts[0].address


def test_the_agent_for_mpirun_runs_commands_on_the_host_that_is_named(make_hosts):
    hosts = make_hosts(2)
    command = [hosts.ssh_agent(), "-x", "host-1", "hostname;", "echo", "$((1 + 1))"]
    assert hosts[0].run(command).split() == ["host-1", "2"]
    with pytest.raises(RuntimeError, match="no host host-7"):
        hosts[0].run([hosts.ssh_agent(), "host-7", "hostname"])


def links():
    return {line.split(":")[1].split("@")[0].strip() for line in ip("link").splitlines() if line[0].isdecimal()}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}/ns/net").exists() and namespace(pid)]


def namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def test_nothing_is_left_whatever_ran(make_hosts):
    before = links()
    with pytest.raises(KeyError), NetworkHosts(2, rate_mbit=RATE_MBIT) as hosts:
        assert len(links() - before) == 1
        stubborn = "import os, signal; os.fork(); os.setsid(); signal.signal(15, 1); print(flush=True); signal.pause()"
        process = hosts[1].start([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        process.stdout.readline()
        pids = [pid for host in hosts for pid in host.processes()]
        assert len(pids) >= 3
        raise KeyError
    assert links() == before
    assert alive(pids) == []
    process.stdout.close()


def test_nothing_is_left_when_the_process_that_made_them_is_killed(make_hosts):
    before = links()
    code = (
        "import signal\nfrom benchmarks.network_hosts import NetworkHosts\n"
        "with NetworkHosts(2) as hosts:\n    print(*[host.pid for host in hosts], flush=True)\n    signal.pause()\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    assert len(links() - before) == 1
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    for end in ends:
        assert select.select([end], [], [], 10)[0], "a host outlived its maker"
        os.close(end)
    monitor = subprocess.Popen(["ip", "monitor", "link"], stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 10
    while links() - before:  # the kernel takes namespaces apart in its own time
        assert time.monotonic() < limit, "a link is left"
        if select.select([monitor.stdout], [], [], 0.2)[0]:
            os.read(monitor.stdout.fileno(), 1 << 16)
    monitor.kill()
    monitor.wait()
    monitor.stdout.close()


def test_delays_hold(make_hosts):
    if reason := network_hosts.delay_available():
        pytest.skip(reason)
    hosts = make_hosts(2)
    hosts[0].limit(RATE_MBIT, delay_ms=50)
    code = (
        "import socket, sys, time; began = time.monotonic(); "
        "socket.create_connection((sys.argv[1], int(sys.argv[2])), 10); print(time.monotonic() - began)"
    )
    _, port = serve(hosts[1])
    hosts[0].run([sys.executable, "-c", code, "host-1", port])  # asks for the address too
    _, port = serve(hosts[1])
    assert float(hosts[0].run([sys.executable, "-c", code, "host-1", port])) > 0.045


def test_a_machine_without_the_tools_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare" in network_hosts.available()
    assert network_hosts.available() == network_hosts.delay_available()


@pytest.mark.parametrize(("count", "limits"), [(0, {}), (65, {}), (2, {"delay_ms": 1.0})])
def test_what_cannot_be_made_is_refused(count, limits):
    with pytest.raises(ValueError, match=f"{count} hosts"):
        NetworkHosts(count, **limits)
