"""Names of hosts on InfiniBand, on machines where they have others there: the only network between distant nodes."""

import os

MACHINES = ("juwels", "juwelsbooster", "jurecadc", "jusuf")  # by SYSTEMNAME; there HOST is HOSTi on InfiniBand
INTERFACE = "ib0"  # the name of the network interface; elsewhere gloo chooses one


def is_here() -> bool:
    """Whether this machine's nodes have another name on the fast network."""
    return os.environ.get("SYSTEMNAME") in MACHINES


def name_of(host: str) -> str:
    """Return the name of a host on the fast network: gpu7.site becomes gpu7i.site. An address stays as it is."""
    first, dot, domain = host.partition(".")
    if not is_here() or ":" in host or host.replace(".", "").isdigit() or first.endswith("i"):
        return host
    return f"{first}i{dot}{domain}"


def interface() -> dict[str, str]:
    """Return gloo's variable for the network interface; {} where it is set, or gloo chooses."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE} if is_here() and "GLOO_SOCKET_IFNAME" not in os.environ else {}
