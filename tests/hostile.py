"""Files that were damaged, or made to do harm, at random from a fixed seed: values of other kinds,
names that lead elsewhere, texts that are no JSON. `JALI_FUZZ=5000` tries that many of each file."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jali.cli.exits import LONGEST

ROUNDS = int(os.environ.get("JALI_FUZZ", "12"))
Jali = Callable[..., Any]

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**19, 1e308, -0.5, "", ".", "..", "../secret", "/etc/passwd", "a/b",
    "x" * 100_000, "a\0b", "\x1b[2Jgone", "\u202eabc", "line\nline", "nan", [], {}, [[]], [1, "a"],
    {"a": 1}, list(range(2000)), {str(i): i for i in range(2000)},
)  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(items)[:20]:
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))
        else:
            yield (*path, key)


def change_value(value: Any, dice: random.Random) -> Any:
    value = copy.deepcopy(value)
    path = dice.choice(list(places(value)))
    if not path:
        return dice.choice((*VALUES, deep(90)))
    *way, last = path
    inside = value
    for key in way:
        inside = inside[key]
    what = dice.random()
    if what < 0.15:
        del inside[last]
    elif what < 0.25 and isinstance(inside, dict):
        inside[dice.choice(("", "new", "../x", "x" * 5000))] = inside.pop(last)
    else:
        inside[last] = dice.choice((*VALUES, deep(90)))
    return value


def change_text(text: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(text))
    return dice.choice(
        (
            lambda: text[:at],
            lambda: text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :],
            lambda: text[:at] + b"\xff\xfe" + text[at:],
            lambda: text[:at] + dice.choice((b"NaN", b"-Infinity", b"1e999")) + text[at:],
            lambda: text[:at] + b"9" * 5000 + text[at:],
            lambda: text[:at] + b'"\\ud800"' + text[at:],
            lambda: b"[" * 100_000,
            lambda: b'{"a":' * 50_000,
            lambda: text[:1] + b'"kind": 1, ' + text[1:],
            lambda: b"",
            lambda: b"\0" * 1000,
        )
    )()


def changes(text: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.25:
        return change_text(text, dice)
    lines = text.splitlines()
    at = dice.randrange(len(lines)) if b"}\n{" in text else None  # an object a line
    if at is None:
        return json.dumps(change_value(json.loads(text), dice)).encode()
    lines[at] = json.dumps(change_value(json.loads(lines[at]), dice)).encode()
    return b"\n".join(lines) + b"\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_end(done: Any, what: str) -> None:
    """0, or one line of a few letters and a code that means something."""
    assert done.exit_code in (0, 1, 2), what
    assert "Traceback" not in done.stderr
    if done.exit_code:
        lines = done.stderr.splitlines()
        assert len(lines) == 1, (what, lines)
        assert lines[0].startswith("jali: "), (what, lines)
        assert lines[0].isprintable(), what
        assert len(lines[0]) <= LONGEST + 20, what


def attack(
    jali: Jali,
    folder: Path,
    file: str,
    commands: Sequence[tuple[object, ...]],
    out: Path,
    whole: bool = True,
) -> None:
    """Change one file of a folder again and again; every command survives it, and nothing in the
    folder changes. Where `whole`, a command that fails has written nothing to `out`."""
    dice, path = random.Random(file), folder / file
    good = path.read_bytes()
    for number in range(ROUNDS):
        path.write_bytes(changes(good, dice))
        before, command = contents(folder), commands[number % len(commands)]
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        done = jali(*command)
        check_end(done, f"round {number}: {command[:3]} with {path.read_bytes()[:2000]!r}")
        assert contents(folder) == before
        if whole and done.exit_code:
            assert not os.listdir(out), f"round {number}"
    path.write_bytes(good)
