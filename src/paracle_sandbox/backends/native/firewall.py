"""The host's side of the bridge network: one nftables table of our own, and nothing else touched.

    sandbox ─ eth0 ═ pcl7 ─ entering ─┬─ receiving: nothing is for the host
                                      └─ passing ── leaving ── hiding (NAT) ── the uplink
    the uplink ── passing: only answers ── pcl7 ═ eth0 ─ sandbox

The rules match interfaces by the prefix of their names, so they are the same for one sandbox and
for a thousand, and a link that vanishes with its namespace needs no rule removed. `entering` comes
before connection tracking and before anybody's port forwarding: a published port of another
program on an address of the host must not turn into a way in.

What this table cannot do: a packet that another table drops stays dropped. Where the host's own
forward policy is `drop` (Docker and ufw set it), let the interfaces pass there, for instance with
`iptables -I DOCKER-USER -i pcl+ -j ACCEPT` and `iptables -I DOCKER-USER -o pcl+ -j ACCEPT`.
"""

from __future__ import annotations

from ipaddress import IPv4Network

from ..machine.nftables import AZURE, DENIED, load_table, remove_table

TABLE = "paracle_sandbox"
# The host's table of connections is shared by all: no sandbox may fill it.
_MAX_CONNECTIONS = 4096

_RULES = """\
table inet {table} {{
    set connections {{
        type ipv4_addr
        flags dynamic
        size 65535
    }}
    chain entering {{
        type filter hook prerouting priority raw; policy accept;
        iifname "{links}" jump from_sandbox
    }}
    chain from_sandbox {{
        meta nfproto != ipv4 drop
        ip saddr & 0.0.0.3 != 0.0.0.2 drop
        fib saddr . iif oif missing drop
        fib daddr type != unicast drop
        ip daddr {{ {denied} }} drop
        ip daddr {azure} th dport != 53 drop
    }}
    chain receiving {{
        type filter hook input priority filter; policy accept;
        iifname "{links}" drop
    }}
    chain sending {{
        type filter hook output priority filter; policy accept;
        oifname "{links}" ct state != {{ established, related }} drop
    }}
    chain passing {{
        type filter hook forward priority filter; policy accept;
        iifname "{links}" jump leaving
        oifname "{links}" ct state {{ established, related }} accept
        oifname "{links}" drop
    }}
    chain leaving {{
        oifname "{links}" drop
        ct state invalid drop
        ip daddr {{ {denied} }} drop
        ct state new add @connections {{ ip saddr ct count over {connections} }} drop
        accept
    }}
    chain hiding {{
        type nat hook postrouting priority srcnat; policy accept;
        iifname "{links}" masquerade
    }}
}}
"""


def rules(prefix: str, sandboxes: IPv4Network) -> str:
    """The whole table.

    A sandbox has the third address of its four, which the mask says; that the four are those of
    its link, the routing table says."""
    return _RULES.format(
        table=TABLE,
        links=f"{prefix}*",
        denied=", ".join((*DENIED, str(sandboxes))),
        azure=AZURE,
        connections=_MAX_CONNECTIONS,
    )


def load(prefix: str, sandboxes: IPv4Network) -> None:
    """Put the table in force, in place of the one that is there."""
    load_table(TABLE, rules(prefix, sandboxes))


def remove() -> None:
    """No table of ours, whether there was one or not."""
    remove_table(TABLE)
