"""DER as a tree of tags, so that certificates can be changed inside without losing their form."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_CONSTRUCTED = 0x20
_MOST_DEPTH = 24
_CONTENTS = (b"", b"\0", b"\x7f", b"\x80", b"\xff" * 9, b"\0" * 300, b"500101000000Z", b"99991231235959Z", b"00000000000000Z", b"\x2a\x03\x04",
             b"\x55\x1d\x0f", b"\x55\x1d\x25", b"\xed\xa0\x80", b"\x1b[2J", b"a" * 2000)  # fmt: skip
_TAGS = (0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0C, 0x13, 0x16, 0x17, 0x18, 0x1E, 0x30, 0x31, 0x80, 0xA0, 0xA3)


@dataclass(slots=True, eq=False)
class Node:
    """A tag with its contents: bytes, or further nodes."""

    tag: int
    content: bytes | list[Node]


def changed(raw: bytes, rng: Random) -> bytes:
    """Return other DER: one node changed; as bytes where there is none."""
    tree = read(raw)
    if not tree:
        return rng.randbytes(rng.randint(0, 40))
    for _ in range(rng.choice((1, 1, 2))):
        _change(rng.choice(lists(tree)), rng)
    return b"".join(map(written, tree))


def _change(siblings: list[Node], rng: Random) -> None:
    if not siblings:
        siblings.append(Node(rng.choice(_TAGS), rng.choice(_CONTENTS)))
        return
    at = rng.randrange(len(siblings))
    node = siblings[at]
    kind = rng.randrange(8)
    if kind == 0:
        del siblings[at]
    elif kind == 1:
        siblings.insert(at, Node(node.tag, node.content))
    elif kind == 2:
        node.tag = rng.choice(_TAGS)
    elif kind == 3:
        siblings[at] = siblings[rng.randrange(len(siblings))]
    elif isinstance(node.content, bytes) and kind < 6 and node.content:
        place = rng.randrange(len(node.content))
        node.content = node.content[:place] + rng.randbytes(1) + node.content[place + 1 :]
    else:
        node.content = rng.choice(_CONTENTS)


def lists(tree: list[Node]) -> list[list[Node]]:
    """Return every list of siblings."""
    found = [tree]
    for siblings in found:
        found += [node.content for node in siblings if isinstance(node.content, list)]
    return found


def read(raw: bytes, depth: int = 0) -> list[Node]:
    """Return the nodes of DER; none if it is not whole."""
    nodes, at = [], 0
    while at < len(raw):
        header = _header(raw, at)
        if header is None:
            return []
        begin, end = header
        inside = read(raw[begin:end], depth + 1) if raw[at] & _CONSTRUCTED and depth < _MOST_DEPTH else []
        nodes.append(Node(raw[at], inside or raw[begin:end]))
        at = end
    return nodes


def _header(raw: bytes, at: int) -> tuple[int, int] | None:
    """Return where the contents of the node at a place begin and end."""
    if at + 2 > len(raw):
        return None
    length, begin = raw[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, begin = int.from_bytes(raw[begin : begin + count], "big"), begin + count
    return (begin, begin + length) if begin + length <= len(raw) else None


def written(node: Node) -> bytes:
    content = node.content if isinstance(node.content, bytes) else b"".join(map(written, node.content))
    length = len(content)
    if length < 0x80:
        return bytes([node.tag, length]) + content
    size = (length.bit_length() + 7) // 8
    return bytes([node.tag, 0x80 | size]) + length.to_bytes(size, "big") + content
