"""What leaves a sandbox by its proxy is what was told before, and goes where it was allowed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from rose_core.sandboxes.networks import PUBLIC, Network, may_reach
from rose_core.sandboxes.outside import EgressEffect
from rose_dev.waiting import until
from rose_sandbox.egress import Egress, _Refused, is_near


@dataclass
class Way:
    """A proxy before a server that notes what it is sent."""

    recorded: list[EgressEffect] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    connections: int = 0
    server: int = 0
    proxy: int = 0

    async def ask(self, head: str, body: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy)
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer


@pytest.fixture
async def way() -> AsyncIterator[Way]:
    made = Way()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        made.sent.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def record(effect: EgressEffect) -> None:
        made.recorded.append(effect)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.server = server.sockets[0].getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    made.proxy = listener.getsockname()[1]

    @contextmanager
    def connected() -> Iterator[None]:
        made.connections += 1
        yield
        made.connections -= 1

    egress = Egress(["127.0.0.1"], record, connected=connected)
    await egress.serve(listener)
    yield made
    await egress.close()
    server.close()
    await server.wait_closed()


async def test_a_sandbox_has_a_connection_from_its_beginning_to_its_end(way: Way) -> None:
    """By the answer that comes through it an agent inside acts, of whom its host sees nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.proxy)
    await until(lambda: way.connections == 1)
    writer.write(f"GET http://127.0.0.1:{way.server}/a HTTP/1.1\r\n\r\n".encode())
    assert b"200 OK" in await reader.read()
    writer.close()
    await until(lambda: way.connections == 0)


async def test_a_request_goes_to_the_host_that_was_allowed_and_to_no_other_behind_it(
    way: Way,
) -> None:
    url = f"http://127.0.0.1:{way.server}/orders?x=1"
    answer = await way.ask(f"POST {url} HTTP/1.1\r\nHost: pay.example\r\nContent-Length: 0\r\n\r\n")
    assert answer.endswith(b"ok")
    assert [(one.method, one.target) for one in way.recorded] == [
        ("POST", f"127.0.0.1:{way.server}/orders")
    ]
    (head,) = way.sent
    assert head.startswith(b"POST /orders?x=1 HTTP/1.1\r\n")
    assert head.lower().count(b"host:") == 1
    assert f"Host: 127.0.0.1:{way.server}\r\n".encode() in head


@pytest.mark.parametrize(
    "fields",
    [
        "X: 1\nTransfer-Encoding: chunked",
        "X: 1\rTransfer-Encoding: chunked",
        "Content-Length: 0\r\nContent-Length: 40",
        "Transfer-Encoding: chunked",
    ],
)
async def test_a_second_request_inside_one_that_was_told_is_refused(way: Way, fields: str) -> None:
    body = b"0\r\n\r\nPOST /pay HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    answer = await way.ask(f"GET http://127.0.0.1:{way.server}/ HTTP/1.1\r\n{fields}\r\n\r\n", body)
    assert answer.split()[1] in {b"400", b"411"}
    assert way.sent == []
    assert way.recorded == []


async def test_other_hosts_are_refused_by_name(way: Way) -> None:
    answer = await way.ask("CONNECT other.example:443 HTTP/1.1\r\n\r\n")
    assert answer.split()[1] == b"403"
    assert b"other.example" in answer
    assert b"--egress" in answer
    assert way.recorded == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.8.8", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]"],
)
async def test_a_pattern_does_not_reach_the_node_itself(way: Way, host: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = listener.getsockname()[1]
    received: list[EgressEffect] = []

    async def record(effect: EgressEffect) -> None:
        received.append(effect)

    egress = Egress(["*"], record)
    await egress.serve(listener)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
    url = f"http://{host}:{way.server}/"
    writer.write(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    await egress.close()
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"--egress" in answer
    assert (way.sent, received) == ([], [])


def test_near_is_the_loopback_the_link_and_what_this_machine_answers_to() -> None:
    near = ["127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1"]
    assert [one for one in near if not is_near(one)] == []
    assert is_near("::ffff:169.254.169.254")
    assert is_near("2002:a9fe:a9fe::1")
    assert is_near("64:ff9b::a9fe:a9fe"), "what a translator makes of 169.254.169.254"
    assert is_near("64:ff9b:1::127.0.0.1")
    assert not is_near("64:ff9b::192.0.2.7")
    assert not is_near("192.0.2.7")
    assert not is_near("2001:db8::7")


@pytest.mark.parametrize(
    "address",
    [
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd00:42::42",
        "fd20:ce::254",
        "::ffff:100.100.100.200",
        "64:ff9b::100.100.100.200",
    ],
)
def test_near_is_where_a_cloud_serves_a_machines_credentials(address: str) -> None:
    assert is_near(address)


async def test_an_address_of_the_cloud_is_reached_where_it_was_allowed_and_not_by_a_pattern() -> (
    None
):
    async def record(_effect: EgressEffect) -> None:
        pass

    with pytest.raises(_Refused, match=r"its cloud's; start the host with --egress fd00:ec2::254"):
        await Egress(["*"], record)._reachable("fd00:ec2::254", 80)
    assert await Egress(["fd00:ec2::254"], record)._reachable("fd00:ec2::254", 80) == [
        "fd00:ec2::254"
    ]


NETWORKS = (Network("192.0.2.0/24", ("192.0.2.7/32",), ((443, 443), (8000, 8080))),)


@pytest.mark.parametrize(
    ("address", "port", "allowed"),
    [
        ("192.0.2.1", 443, True),
        ("192.0.2.1", 8080, True),
        ("192.0.2.1", 80, False),
        ("192.0.2.7", 443, False),
        ("192.0.3.1", 443, False),
        ("::ffff:192.0.2.1", 443, True),
        ("::ffff:192.0.2.7", 443, False),
        ("64:ff9b::c000:201", 443, False),
        ("2001:db8::1", 443, False),
    ],
)
def test_a_network_has_addresses_and_ports_however_an_address_is_written(
    address: str, port: int, *, allowed: bool
) -> None:
    assert may_reach(NETWORKS, address, port) is allowed


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("198.51.100.7", True),
        ("10.0.0.1", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("2001:db8::1", True),
        ("fd00::1", False),
        ("64:ff9b::a00:1", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_the_public_internet_is_nobodys_own_network(address: str, *, public: bool) -> None:
    assert may_reach(PUBLIC, address, 443) is public


@pytest.mark.parametrize("within", ["127.0.0.0/8", "192.0.2.0/24"])
async def test_a_proxy_dials_only_where_its_sandboxs_template_lets_it(
    way: Way, within: str
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[EgressEffect] = []

    async def record(effect: EgressEffect) -> None:
        received.append(effect)

    egress = Egress(["127.0.0.1"], record, [Network(within)])
    await egress.serve(listener)
    way.proxy = listener.getsockname()[1]
    answer = await way.ask(f"GET http://127.0.0.1:{way.server}/ HTTP/1.1\r\n\r\n")
    await egress.close()
    if within.startswith("127"):
        assert answer.endswith(b"ok")
        assert len(received) == len(way.sent) == 1
    else:
        assert b" 403 " in answer
        assert b"template does not let it" in answer
        assert not received
        assert not way.sent
