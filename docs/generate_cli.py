"""Write docs/cli.md from the commands themselves.

python docs/generate_cli.py           # rewrite
python docs/generate_cli.py --check   # exit 1 where the page says something else
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from jali.cli.main import app
from jali.cli.options import name_methods

PAGE = Path(__file__).parent / "cli.md"
HEAD = """# Command line

*Generated from the commands by `python docs/generate_cli.py`; `--help` says the same.*

Every command takes `--help`; those that measure or make something take `--json`, which prints JSON
on stdout and nothing else. `jali --install-completion` completes names with Tab (bash, zsh, fish,
PowerShell). Exit codes: **0** done, **1** a job that failed (no disk, no memory,
numbers that are not finite), **2** input that cannot be used, said in one sentence, **130** Ctrl-C.
Nothing half-written stays behind, and nothing is overwritten by other settings.

The flags of ESA's and PSA's scripts are taken too (`--use_psa`, `--attention_preset`,
`--num_inference_steps`, `--output_dir`, …), as are their names of models (`wan21_1.3b`,
`cogvideo1.5_5b`, …); flags that have no effect here say so.
"""


def page() -> str:
    root: Any = typer.main.get_command(app)
    lines = [HEAD, "| command | |", "|---|---|"]
    for words, command in commands(root):
        text = (command.get_short_help_str(limit=200) or "").rstrip(".")
        lines.append(f"| [`jali {' '.join(words)}`](#jali-{'-'.join(words)}) | {_cell(text)} |")
    lines.append("")
    for words, command in commands(root):
        lines += section(words, command)
    return "\n".join(lines).rstrip() + "\n"


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def section(words: tuple[str, ...], command: Any) -> Iterator[str]:
    name_methods(command)
    name = " ".join(words)
    text, examples = split(f"{command.help or ''}\n\n{command.epilog or ''}")
    yield from (f"## jali {name}", "", text, "")
    if examples:
        yield from ("```sh", *examples, "```", "")
    shown = [param for param in command.params if not param.hidden and param.name != "help"]
    if not shown:
        return
    yield from ("| option | default | |", "|---|---|---|")
    for param in shown:
        yield f"| {_cell(_names(param))} | {_cell(_default(param))} | {_cell(param.help or '')} |"
    yield ""


def split(text: str) -> tuple[str, list[str]]:
    """A help text without its examples, and the examples."""
    before, _, after = text.partition("Examples:")
    if not after:
        before, _, after = text.partition("Example:")
    lines = [" ".join(part.split()) for part in after.split("\n\n")]
    paragraphs = [" ".join(part.split()) for part in before.split("\n\n")]
    return "\n\n".join(p for p in paragraphs if p), [line for line in lines if line]


def _names(param: Any) -> str:
    if not param.opts or not param.opts[0].startswith("-"):
        return f"`{param.metavar or param.name.upper()}`"
    names = [f"`{name}`" for name in (*param.opts, *param.secondary_opts)]
    return " / ".join(names)


def _default(param: Any) -> str:
    if param.required:
        return "*required*"
    if isinstance(param.show_default, str):
        return param.show_default
    default = param.default() if callable(param.default) else param.default
    if default is None or default is False or default in ("", (), []):
        return ""
    if default is True and getattr(param, "is_flag", False):
        return "on"
    return f"`{default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(check: bool) -> int:
    found = page()
    if check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != found):
        sys.stderr.write("docs/cli.md is not what the commands say: python docs/generate_cli.py\n")
        return 1
    if not check:
        PAGE.write_text(found, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
