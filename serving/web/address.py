"""The address of a client, for limits per client."""

import ipaddress


def address_key(host: str) -> str:
    """Return the part of an address that one client cannot change: IPv4, or the first 64 bits of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else address.packed[:8].hex()
    return host
