"""Pages from templates: what they say is escaped, and what they need is inside them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(package: str, template: str, **values: Any) -> str:
    """The template file of a package, filled in.

    Besides `values`, a template has `source(name)`, another file of the package (or `PACKAGE/NAME`
    of `jali.evaluation`, which it may include too) as it is: a style, a script. And `tojson`, safe
    inside a script whatever the words in it.

    Raises:
        ImportError: jinja2 is not installed.

    Example:
        >>> render("jali.evaluation.report", "page.html", title="psa against dense", ...)
    """
    return _environment(package).get_template(template).render(values)


def check_installed() -> None:
    """Refuse where jinja2 is missing; asked before slow work."""
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("a page needs jinja2: pip install 'jali[report]'")


@functools.cache
def _environment(package: str) -> Environment:
    check_installed()
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = ChoiceLoader([PackageLoader(package, ""), PackageLoader("jali.evaluation", "")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["source"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "allow_nan": False, "separators": (",", ":")
    }  # fmt: skip
    return environment
