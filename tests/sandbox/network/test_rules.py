"""Rules and places."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.sandbox.network.rules import parse, place, plain_address, plain_name


@pytest.mark.parametrize(
    ("text", "address", "ports"),
    [
        ("10.1.2.3", "10.1.2.3", (1, 65535)),
        ("10.1.2.3:5432", "10.1.2.3", (5432, 5432)),
        ("10.0.0.0/8:80-90", "10.9.9.9", (80, 90)),
        ("2001:db8::1", "2001:db8::1", (1, 65535)),
        ("[2001:db8::/32]:443", "2001:db8:1::1", (443, 443)),
        ("[::1]", "::1", (1, 65535)),
    ],
)
def test_rules_of_addresses(text: str, address: str, ports: tuple[int, int]) -> None:
    rule = parse(text)
    assert rule.ports == ports and rule.holds(ipaddress.ip_address(address), ports[0])
    assert not rule.holds(ipaddress.ip_address("11.1.1.1"), ports[0]) and not rule.names("a.org", ports[0])
    assert ports[1] == 65535 or not rule.holds(ipaddress.ip_address(address), ports[1] + 1)


def test_rules_of_names() -> None:
    assert parse("PyPI.org.").names("pypi.org", 443) and not parse("pypi.org").names("x.pypi.org", 443)
    below = parse("*.pypi.org:443")
    assert below.names("a.b.pypi.org", 443) and not below.names("a.pypi.org", 80)
    assert not below.names("pypi.org", 443) and not below.names("evilpypi.org", 443)
    assert parse("bücher.example").names(plain_name("BÜCHER.example"), 1)


@pytest.mark.parametrize("text", [
    "", "*", "*.*.org", "a..b", "-a.org", "a b.org", "127.1", "2130706433", "0x7f.0.0.1", "1.2.3.4.5", "10.0.0.0/33",
    "a.org:0", "a.org:x", "a.org:90-80", "a.org:70000", "http://a.org", "a.org/24", "a.org:", "x" * 64 + ".org",
])  # fmt: skip
def test_what_is_no_rule_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="network rule") as caught:
        parse(text)
    assert "*.x.org" in caught.value.hint


@pytest.mark.parametrize(("text", "what"), [
    ("127.0.0.1", "loopback"), ("127.9.9.9", "loopback"), ("::1", "loopback"), ("0.0.0.0", "private"),
    ("10.0.0.1", "private"), ("172.16.9.9", "private"), ("192.168.0.1", "private"), ("100.64.0.1", "private"),
    ("169.254.169.254", "metadata"), ("168.63.129.16", "metadata"), ("fd00:ec2::254", "metadata"),
    ("169.254.1.1", "link-local"), ("fe80::1", "link-local"), ("fd12::1", "private"), ("224.0.0.1", "private"),
    ("255.255.255.255", "private"), ("ff02::1", "private"), ("::", "private"), ("::ffff:10.0.0.1", "private"),
    ("::ffff:169.254.169.254", "metadata"), ("64:ff9b::a9fe:a9fe", "metadata"), ("64:ff9b::7f00:1", "loopback"),
    ("2002:7f00:1::", "loopback"), ("2002:a00:1::", "private"), ("::7f00:1", "loopback"), ("::a00:1", "private"),
    ("64:ff9b:1::1", "private"),
])  # fmt: skip
def test_no_public_place(text: str, what: str) -> None:
    assert what in place(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_places(text: str) -> None:
    assert place(ipaddress.ip_address(text)) == ""


def test_an_address_has_one_form() -> None:
    assert str(plain_address("::FFFF:1.2.3.4")) == "1.2.3.4" and str(plain_address("[2001:DB8::1]")) == "2001:db8::1"
    assert plain_address("a.org") is None and plain_address("127.1") is None and plain_address("010.0.0.1") is None
    with pytest.raises(ValueError, match="interface"):
        plain_address("fe80::1%eth0")


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        rule = parse(text)
    except ConfigError:
        return
    assert (rule.block is None) == bool(rule.name) and 1 <= rule.ports[0] <= rule.ports[1] <= 65535


@settings(deadline=None)
@given(st.ip_addresses(v=4))
def test_clothes_hide_no_address(address: ipaddress.IPv4Address) -> None:
    """What is private as IPv4 is so in every form of IPv6 that carries it."""
    if place(address):
        for prefix in ("::ffff:0:0", "64:ff9b::"):
            assert place(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | int(address)))
        assert place(ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80)))
