"""A box's policy as it is applied: may it reach this name, this address, at this port?

Owns: the order of the rules. What the operator denies comes first; then an address that is not public needs a rule of
the operator that names it; then ``allow``, ``deny``, and last whether the internet is open. A name is looked up only
when a rule could let it through, so that asking for names tells nobody anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.boxes import NetworkPolicy
from tandem.sandbox.network.rules import Address, Rule, parse, place

NARROW = {4: 8, 6: 7}  # the shortest prefixes of private blocks: 10.0.0.0/8, fc00::/7


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``by_name``: an allow rule of the name let it through, so the other side must be that name's."""

    allowed: bool
    why: str
    by_name: bool = False


class Policy:
    """Raises ConfigError for a rule that is none."""

    def __init__(self, policy: NetworkPolicy) -> None:
        self.limits = policy
        self._internet = policy.internet
        self._allow = [parse(text) for text in policy.allow]
        self._deny = [parse(text) for text in policy.deny]
        self._never = [parse(text) for text in policy.never]
        self._private = [rule for rule in map(parse, policy.private) if _is_private(rule)]

    def judge_name(self, name: str, port: int) -> Verdict:
        """Before its lookup; the addresses are judged too. ``name`` as ``plain_name`` makes it."""
        if (rule := _naming(self._never, name, port)) is not None:
            return _denied(f"the operator denies {rule.text}")
        if (rule := _naming(self._allow, name, port)) is not None:
            return Verdict(allowed=True, why=f"allow {rule.text}", by_name=True)
        if (rule := _naming(self._deny, name, port)) is not None:
            return _denied(f"deny {rule.text}")
        if self._internet:
            return Verdict(allowed=True, why="internet")
        if (rule := next((rule for rule in self._allow if rule.whole and rule.at(port)), None)) is not None:
            return Verdict(allowed=True, why=f"allow {rule.text}")
        return _denied("no rule allows it")

    def judge_name_anywhere(self, name: str) -> Verdict:
        """Whether it may be looked up: at one port at least a rule could let it through."""
        ports = {80, 443, *(rule.ports[0] for rule in self._allow)}
        verdicts = [self.judge_name(name, port) for port in sorted(ports)]
        return next((verdict for verdict in verdicts if verdict.allowed), verdicts[0])

    def judge_address(self, address: Address, port: int, *, by_name: bool = False) -> Verdict:
        """``by_name``: an allow rule of its name was there."""
        if (rule := _holding(self._never, address, port)) is not None:
            return _denied(f"the operator denies {rule.text}")
        where = place(address)
        if where and _holding(self._private, address, port) is None:
            return _denied(f"{address} is {where}")
        allow = _holding([rule for rule in self._allow if not (where and rule.whole)], address, port)
        if by_name:
            return Verdict(allowed=True, why="its name is allowed", by_name=True)
        if allow is not None:
            return Verdict(allowed=True, why=f"allow {allow.text}")
        if (rule := _holding(self._deny, address, port)) is not None:
            return _denied(f"deny {rule.text}")
        if self._internet and not where:
            return Verdict(allowed=True, why="internet")
        return _denied("no rule allows it")


def check(policy: NetworkPolicy) -> NetworkPolicy:
    """The policy itself. Raises ConfigError for a rule that is none."""
    Policy(policy)
    return policy


def _is_private(rule: Rule) -> bool:
    """Whether a rule names a place that is not public, and nothing that is."""
    block = rule.block
    if block is None or block.prefixlen < NARROW[block.version]:
        return False
    return all(place(end) for end in (block[0], block[-1]))


def _holding(rules: Sequence[Rule], address: Address, port: int) -> Rule | None:
    return next((rule for rule in rules if rule.holds(address, port)), None)


def _naming(rules: Sequence[Rule], name: str, port: int) -> Rule | None:
    return next((rule for rule in rules if rule.names(name, port)), None)


def _denied(why: str) -> Verdict:
    return Verdict(allowed=False, why=why)
