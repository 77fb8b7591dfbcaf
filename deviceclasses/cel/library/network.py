"""IP addresses and networks."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from deviceclasses.cel.library.registry import function, method, succeeds
from deviceclasses.cel.types import BOOL, CIDR, INT, IP, STRING
from deviceclasses.cel.values import EvaluationError, Opaque

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Ip(Opaque):
    address: Address
    type_name = IP.name


@dataclass(frozen=True)
class Cidr(Opaque):
    """An address with the length of its network prefix; ``masked`` clears the host bits."""

    address: Address
    bits: int
    type_name = CIDR.name

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        return ipaddress.ip_network(f"{self.address}/{self.bits}", strict=False)


def parse_ip(text: str) -> Ip:
    """Parse an address. Raises EvaluationError, also for an address with a zone and an IPv4-mapped IPv6 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise EvaluationError(f"{text!r} is not an IP address") from None
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id is not None or address.ipv4_mapped is not None):
        raise EvaluationError(f"{text!r}: a zone or an IPv4-mapped address is not allowed")
    return Ip(address)


def parse_cidr(text: str) -> Cidr:
    """Parse an address, a slash and a prefix length. Raises EvaluationError for any other text."""
    address, slash, bits = text.partition("/")
    if not slash or not re.fullmatch("0|[1-9][0-9]{0,2}", bits):
        raise EvaluationError(f"{text!r} is not a network such as 10.0.0.0/8")
    found = parse_ip(address).address
    if int(bits) > found.max_prefixlen:
        raise EvaluationError(f"{text!r} has more than {found.max_prefixlen} bits")
    return Cidr(found, int(bits))


def _contains_ip(cidr: Cidr, ip: Ip) -> bool:
    return ip.address in cidr.network


def _contains_cidr(cidr: Cidr, other: Cidr) -> bool:
    same_family = cidr.address.version == other.address.version
    return same_family and cidr.bits <= other.bits and other.address in cidr.network


def _is_global_unicast(ip: Ip) -> bool:
    """Whether Go calls the address global unicast: private addresses are, broadcast is not."""
    address = ip.address
    return not (
        address.is_unspecified
        or address.is_loopback
        or address.is_multicast
        or address.is_link_local
        or str(address) == "255.255.255.255"
    )


LINK_LOCAL_GROUPS = (ipaddress.ip_network("224.0.0.0/24"), ipaddress.ip_network("ff00::/8"))


def _is_link_local_multicast(ip: Ip) -> bool:
    if ip.address.version == 4:
        return ip.address in LINK_LOCAL_GROUPS[0]
    return ip.address in LINK_LOCAL_GROUPS[1] and ip.address.packed[1] & 0x0F == 0x02


function("ip", [STRING], IP, parse_ip)
function("isIP", [STRING], BOOL, succeeds(parse_ip))
function("ip.isCanonical", [STRING], BOOL, lambda text: str(parse_ip(text).address) == text)
method("family", [IP], INT, lambda ip: ip.address.version)
method("isUnspecified", [IP], BOOL, lambda ip: ip.address.is_unspecified)
method("isLoopback", [IP], BOOL, lambda ip: ip.address.is_loopback)
method("isLinkLocalMulticast", [IP], BOOL, _is_link_local_multicast)
method("isLinkLocalUnicast", [IP], BOOL, lambda ip: ip.address.is_link_local)
method("isGlobalUnicast", [IP], BOOL, _is_global_unicast)
function("string", [IP], STRING, lambda ip: str(ip.address))
function("cidr", [STRING], CIDR, parse_cidr)
function("isCIDR", [STRING], BOOL, succeeds(parse_cidr))
method("containsIP", [CIDR, STRING], BOOL, lambda cidr, text: _contains_ip(cidr, parse_ip(text)))
method("containsIP", [CIDR, IP], BOOL, _contains_ip)
method("containsCIDR", [CIDR, STRING], BOOL, lambda cidr, text: _contains_cidr(cidr, parse_cidr(text)))
method("containsCIDR", [CIDR, CIDR], BOOL, _contains_cidr)
method("ip", [CIDR], IP, lambda cidr: Ip(cidr.address))
method("prefixLength", [CIDR], INT, lambda cidr: cidr.bits)
method("masked", [CIDR], CIDR, lambda cidr: Cidr(cidr.network.network_address, cidr.bits))
function("string", [CIDR], STRING, lambda cidr: f"{cidr.address}/{cidr.bits}")
