"""Changes to inputs that reach behind a parser's first check: documents stay JSON, headers keep their length.

Everything random comes from the generator that is given, so that a seed names an input for good.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from random import Random

from fuzz import der
from fuzz.trees import Array, Nested, Number, Object, Tree, copied, nodes, read, write

Mutator = Callable[[bytes, Random], bytes]

PART = b"\n%%%%\n"
"""Between the files of an input that is several."""

NUMBERS = (
    "-1", "0", "1", "2", "3", "7", "16", "64", "255", "1000", "4096", "65535", "65536", "1000000", "2147483647", "2147483648",
    "4294967296", "1000000000000", "9007199254740992", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "1" + "0" * 40, "9" * 390, "9" * 4400, "-0", "0.5", "1.0", "-1e308", "1e999",
    "1e-400", "1E+9", "NaN", "Infinity", "-Infinity",
)  # fmt: skip
TEXTS = (
    "", "a", "#", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "a/../../b", "a\\b", "C:a", "~", "-x", "\0", "\n", "\r", "\x1b[2J",
    "\x1b]0;title\x07", "\u202e", "\u2028", "\x9b31m", "\ud800", "\udfff", "\U0001f980", "e\u0301", "\u0130", "\u00df", "A" * 300,
    "a" * 5000, "0", "00", "02", "-1", "007", "1", "2", "1e9", "\u0661", "None", "null", "true", "NaN", "re:.*", "re:(a|aa)+$", "re:(" * 40, "{layer}",
    "{", "}", "%s", "${HOME}", "model.layers.0.mlp.experts.#.w", "fp8", "int8", "fp4", "Linear", "bfloat16", "BF16", "U8", "F4",
)  # fmt: skip
SCALARS: tuple[Tree, ...] = (None, True, False, *map(Number, NUMBERS), *TEXTS)
_BYTES = (
    b"\0",
    b"\xff",
    b"\x80",
    b"\n",
    b"\r",
    b"\x1b",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\\",
    b"\\ud800",
    b"\xed\xa0\x80",
)
_MOST_GROWTH = 64


def some_bytes(raw: bytes, rng: Random) -> bytes:
    """Change, insert, drop, repeat or move bytes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        begin = rng.randint(0, len(raw))
        end = min(len(raw), begin + rng.choice((0, 1, 1, 2, 4, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0:
            raw = raw[:begin] + rng.choice(_BYTES) + raw[end:]
        elif kind == 1:
            raw = raw[:begin] + rng.randbytes(end - begin) + raw[end:]
        elif kind == 2:
            raw = raw[:begin] + raw[end:]
        elif kind == 3:
            raw = raw[:end] + raw[begin:end] * rng.choice((1, 2, 16)) + raw[end:]
        elif kind == 4 and begin < len(raw):
            raw = raw[:begin] + bytes([raw[begin] ^ 1 << rng.randrange(8)]) + raw[begin + 1 :]
        else:
            at = rng.randint(0, len(raw))
            raw = raw[:at] + raw[begin:end] + raw[at:]
    return raw


def json_document(raw: bytes, rng: Random) -> bytes:
    """Change a JSON document as a tree; now and then, or if it is none, as bytes."""
    try:
        tree = read(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return some_bytes(raw, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        tree = _changed(tree, rng)
    raw = write(tree).encode()
    return some_bytes(raw, rng) if rng.randrange(20) == 0 else raw


def json_lines(raw: bytes, rng: Random) -> bytes:
    """Change a file of one JSON document per line: a document, or the order of lines."""
    lines = raw.splitlines(keepends=True)
    if not lines or rng.randrange(8) == 0:
        return text_lines(raw, rng)
    at = rng.randrange(len(lines))
    lines[at] = json_document(lines[at], rng) + b"\n"
    return b"".join(lines)


def text_lines(raw: bytes, rng: Random) -> bytes:
    """Change a text line by line: drop, repeat, swap, cut, and put other numbers in place of those in it."""
    lines = raw.splitlines(keepends=True)
    if not lines:
        return some_bytes(raw, rng)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            lines[at] = _other_number(lines[at], rng)
        elif kind == 1:
            lines.insert(at, lines[other])
        elif kind == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            lines[at] = lines[at][: rng.randint(0, len(lines[at]))] + lines[other][rng.randint(0, len(lines[other])) :]
        elif kind == 4:
            lines[at] = some_bytes(lines[at], rng)
        elif len(lines) > 1:
            del lines[at]
            if not lines:
                return b""
    return b"".join(lines)


def shard_file(raw: bytes, rng: Random) -> bytes:
    """Change the header of a safetensors file and state its new length, unless the lie is about that."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8 or rng.randrange(10) == 0:
        return some_bytes(raw, rng)
    header = json_document(raw[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def in_parts(*mutators: Mutator) -> Mutator:
    """Return what changes one part of an input of several; the last mutator is that of all further parts."""

    def mutate(raw: bytes, rng: Random) -> bytes:
        parts = raw.split(PART)
        at = rng.randrange(len(parts))
        if rng.randrange(30) == 0:
            parts.insert(at, rng.choice(parts))
        else:
            parts[at] = mutators[min(at, len(mutators) - 1)](parts[at], rng)
        return PART.join(parts)

    return mutate


def bundle(raw: bytes, rng: Random) -> bytes:
    """Change a Sigstore bundle: as JSON, or the payload or a certificate that stands in it as base64."""
    try:
        tree = read(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return some_bytes(raw, rng)
    if rng.randrange(3) == 0:
        return json_document(raw, rng)
    _change_base64(tree, rng)
    return write(tree).encode()


def words(*known: str) -> Mutator:
    """Return what puts short texts together: pieces of the input, known words, numbers."""

    def mutate(raw: bytes, rng: Random) -> bytes:
        if rng.randrange(3) == 0:
            return some_bytes(raw, rng)
        begin, end = sorted((rng.randint(0, len(raw)), rng.randint(0, len(raw))))
        new = rng.choice((rng.choice(known), rng.choice(NUMBERS)[:200], rng.choice(TEXTS)[:200]))
        return raw[:begin] + new.encode("utf-8", "surrogatepass") + raw[rng.choice((begin, end)) :]

    return mutate


def _change_base64(tree: Tree, rng: Random) -> None:
    """Change what one of the long texts of a tree says as base64."""
    places = [
        (node, number)
        for node in nodes(tree)
        if isinstance(node, Object)
        for number, (_, value) in enumerate(node.members)
        if isinstance(value, str) and len(value) > 60
    ]
    if not places:
        return
    node, number = rng.choice(places)
    key, text = node.members[number]
    try:
        inner = base64.b64decode(str(text).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return
    changed = json_document(inner, rng) if inner[:1] == b"{" else der.changed(inner, rng)
    node.members[number] = (key, base64.b64encode(changed).decode())


def _changed(tree: Tree, rng: Random) -> Tree:
    """Return a tree with one change somewhere."""
    everywhere = nodes(tree)
    if not everywhere:
        return rng.choice(SCALARS)
    here = rng.choice(everywhere)
    if isinstance(here, Object):
        _change_object(here, everywhere, rng)
    else:
        _change_array(here, everywhere, rng)
    return tree


def _change_object(here: Object, everywhere: Sequence[Object | Array], rng: Random) -> None:
    members = here.members
    if not members or rng.randrange(8) == 0:
        donors = [pair for node in everywhere if isinstance(node, Object) for pair in node.members]
        key = rng.choice((rng.choice(donors)[0] if donors else "a", rng.choice(TEXTS)))
        members.insert(rng.randint(0, len(members)), (key, _value(everywhere, rng)))
        return
    at = rng.randrange(len(members))
    key, value = members[at]
    kind = rng.randrange(10)
    if kind == 0:
        del members[at]
    elif kind == 1:
        members.append((key, copied(value)))
    elif kind == 2:
        members[at] = (_other_text(key, rng), value)
    elif kind == 3:
        members[at] = (rng.choice(members)[0], value)
    else:
        members[at] = (key, _other(value, everywhere, rng))


def _change_array(here: Array, everywhere: Sequence[Object | Array], rng: Random) -> None:
    items = here.items
    kind = rng.randrange(6)
    if not items or kind == 0:
        items.insert(rng.randint(0, len(items)), _value(everywhere, rng))
    elif kind == 1:
        del items[rng.randrange(len(items))]
    elif kind == 2:
        items += [copied(rng.choice(items)) for _ in range(rng.choice((1, 1, 2, _MOST_GROWTH)))]
    elif kind == 3:
        rng.shuffle(items)
    else:
        at = rng.randrange(len(items))
        items[at] = _other(items[at], everywhere, rng)


def _other(value: Tree, everywhere: Sequence[Object | Array], rng: Random) -> Tree:
    """Return something in place of a value: mostly of its own kind."""
    if rng.randrange(4) == 0:
        return _value(everywhere, rng)
    if isinstance(value, Number):
        return _near(value, rng)
    if isinstance(value, str):
        return _other_text(value, rng)
    return not value if isinstance(value, bool) else _value(everywhere, rng)


def _value(everywhere: Sequence[Object | Array], rng: Random) -> Tree:
    """Return any value: a scalar, a copy of a part of the document, or something deep."""
    kind = rng.randrange(12)
    if kind == 0:
        return Nested(rng.choice((3, 63, 70, 3000)), rng.random() < 0.5)
    if kind < 4:
        chosen = copied(rng.choice(everywhere))
        return chosen if len(write(chosen)) < 4000 else Array([])
    return rng.choice((*SCALARS, Array([]), Object([])))


def _near(value: Number, rng: Random) -> Number:
    if not value.text.lstrip("-").isdecimal() or len(value.text) > 100 or rng.randrange(2):
        return Number(rng.choice(NUMBERS))
    number = int(value.text)
    return Number(str(rng.choice((number + 1, number - 1, -number, 2 * number, number // 2, number * 1000))))


def _other_text(text: str, rng: Random) -> str:
    kind = rng.randrange(5)
    at = rng.randint(0, len(text))
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return text[:at] + rng.choice(TEXTS) + text[at:]
    if kind == 2:
        return text[:at] + text[at + 1 :]
    return (
        _other_number(text.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "surrogatepass")
        if kind == 3
        else text.upper()
    )


def _other_number(line: bytes, rng: Random) -> bytes:
    """Put another number in place of one in a line."""
    digits = [at for at in range(len(line)) if line[at : at + 1].isdigit()]
    if not digits:
        return line
    at = rng.choice(digits)
    end = at
    while line[end : end + 1].isdigit():
        end += 1
    return line[:at] + rng.choice(NUMBERS).encode() + line[end:]
