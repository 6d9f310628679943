"""The order of the rules."""

from __future__ import annotations

import ipaddress

import pytest

from tandem.core.boxes import NetworkPolicy
from tandem.core.errors import ConfigError
from tandem.sandbox.network.policy import Policy, check


def names(policy: NetworkPolicy, name: str, port: int = 443) -> bool:
    return Policy(policy).judge_name(name, port).allowed


def reaches(policy: NetworkPolicy, address: str, port: int = 443, *, by_name: bool = False) -> bool:
    return Policy(policy).judge_address(ipaddress.ip_address(address), port, by_name=by_name).allowed


def test_nothing_is_allowed_unless_it_is() -> None:
    assert not names(NetworkPolicy(), "a.org") and not reaches(NetworkPolicy(), "1.1.1.1")
    only = NetworkPolicy(allow=("a.org:443", "1.1.1.0/24"))
    assert names(only, "a.org") and not names(only, "a.org", 80) and not names(only, "b.org")
    assert reaches(only, "1.1.1.9", 80) and not reaches(only, "1.1.2.1")
    assert not names(NetworkPolicy(allow=("1.1.1.1",)), "a.org")  # not even looked up: a name could carry words out


def test_allow_wins_over_deny_and_deny_over_the_internet() -> None:
    policy = NetworkPolicy(internet=True, allow=("1.1.1.1", "good.evil.org"), deny=("1.1.0.0/16", "*.evil.org"))
    assert reaches(policy, "9.9.9.9") and reaches(policy, "1.1.1.1") and not reaches(policy, "1.1.2.2")
    assert names(policy, "x.org") and names(policy, "good.evil.org") and not names(policy, "bad.evil.org")
    assert reaches(policy, "1.1.2.2", by_name=True)
    everything = NetworkPolicy(allow=("0.0.0.0/0:443",))
    assert names(everything, "x.org") and not names(everything, "x.org", 80) and reaches(everything, "9.9.9.9")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.5", "169.254.169.254", "fd00:ec2::254", "fe80::1"])
def test_a_private_place_needs_the_operators_word(address: str) -> None:
    client = NetworkPolicy(internet=True, allow=(address, "0.0.0.0/0", "::/0"))
    assert not reaches(client, address) and not reaches(client, address, by_name=True)
    told = NetworkPolicy(internet=True, allow=(address,), private=(f"[{address}]:443" if ":" in address else address,))
    assert reaches(told, address) and reaches(told, address, by_name=True)
    assert ":" not in address or not reaches(told, address, 80)
    assert not reaches(NetworkPolicy(internet=True, private=told.private), address)  # nobody asked for it
    vague = NetworkPolicy(internet=True, allow=(address,), private=("0.0.0.0/0", "::/0", "0.0.0.0/1", "a.org"))
    assert not reaches(vague, address)


def test_the_operators_never_wins_over_all() -> None:
    policy = NetworkPolicy(internet=True, allow=("a.org", "1.1.1.1"), never=("a.org", "1.0.0.0/8"))
    assert not names(policy, "a.org") and not reaches(policy, "1.1.1.1") and names(policy, "b.org")
    assert not reaches(policy, "1.2.3.4", by_name=True)


def test_a_bad_rule_is_found_before_use() -> None:
    for part in ("allow", "deny", "private", "never"):
        with pytest.raises(ConfigError, match="127.1"):
            check(NetworkPolicy(**{part: ("127.1",)}))


def test_a_name_may_be_looked_up_if_it_may_be_reached_at_some_port() -> None:
    policy = Policy(NetworkPolicy(allow=("a.org:8080",)))
    assert policy.judge_name_anywhere("a.org").allowed and not policy.judge_name_anywhere("b.org").allowed
