"""Run docs/notebook.ipynb and write it again with what came of it, and as a page with pictures.

python docs/generate_notebook.py          # runs every cell, a minute on two cores
python docs/generate_notebook.py --check  # whether the page is that of the notebook; runs nothing

Cells are plain Python without magics, so that running them takes no Jupyter. As there, a cell shows
what it prints and the value of its last line.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOK, PAGE, ASSETS = DOCS / "notebook.ipynb", DOCS / "notebook.md", DOCS / "assets"
NOTE = (
    "*This page is [a notebook](notebook.ipynb): save it and open it in Jupyter. What it shows is "
    "what its last run said.*"
)
Cell = dict[str, Any]


def read() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def execute(cells: list[Cell]) -> dict[str, Any]:
    """Run the code cells in order and put their outputs into them; the names they leave behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = _run("".join(cell["source"]), cell["id"], names, count)
    return names


def _run(source: str, where: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {where}>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {where}>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"data": _shown(value), "metadata": {}}
        outputs.append({"output_type": "execute_result", "execution_count": count, **data})
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """What Jupyter keeps of a value, but of a picture no address in memory."""
    if not hasattr(value, "_repr_png_"):
        return {"text/plain": [repr(value)]}
    png = base64.b64encode(value._repr_png_()).decode()
    return {"image/png": png, "text/plain": ["<a picture>"]}


def page(cells: list[Cell]) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by the names of their files."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            png = output.get("data", {}).get("image/png")
            if png is None:
                text = output.get("text") or output["data"]["text/plain"]
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
            else:
                name = f"notebook-{cell['id']}.png"
                pictures[name] = base64.b64decode(png)
                parts.append(f"![{cell['id'].replace('-', ' ')}](assets/{name})")
    title, _, first = parts[0].partition("\n\n")
    return "\n\n".join([title, NOTE, first, *parts[1:]]) + "\n", pictures


def differences() -> list[str]:
    """The files that are not those of the notebook."""
    text, pictures = page(read()["cells"])
    files = {PAGE: text.encode(), **{ASSETS / name: png for name, png in pictures.items()}}
    wrong = [path.name for path, data in files.items() if not _holds(path, data)]
    stray = {path.name for path in ASSETS.glob("notebook-*")} - set(pictures)
    return [*wrong, *sorted(stray)]


def _holds(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


def main(check: bool) -> int:
    if check:
        if wrong := differences():
            sys.stderr.write(
                f"not what docs/notebook.ipynb says: {', '.join(wrong)}; "
                f"python docs/generate_notebook.py\n"
            )
        return int(bool(wrong))
    notebook = read()
    execute(notebook["cells"])
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    text, pictures = page(notebook["cells"])
    PAGE.write_text(text, encoding="utf-8")
    for old in ASSETS.glob("notebook-*"):
        old.unlink()
    for name, png in pictures.items():
        (ASSETS / name).write_bytes(png)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
