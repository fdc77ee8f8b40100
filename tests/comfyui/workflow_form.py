"""A workflow as the window saves it, as the server takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def api_of(workflow: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes by number, their inputs by name: values of widgets lie in order, links by number.
    `known` is what the server says of its nodes (`/object_info`)."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        inputs = {
            each["name"]: links[each["link"]] for each in node["inputs"] if each["link"] is not None
        }
        values = iter(node.get("widgets_values", ()))
        for name, kind, more in widgets(known[node["type"]]["input"]):
            if name not in inputs:
                inputs[name] = next(values)
                if more.get("control_after_generate"):
                    next(values)
            assert kind
        assert next(values, None) is None, node["type"]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def widgets(given: Mapping[str, Any]) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """(name, kind, options) of the inputs that are no links, in order."""
    found = []
    for part in ("required", "optional"):
        for name, (kind, *more) in given.get(part, {}).items():
            if isinstance(kind, list | tuple) or kind in WIDGETS:
                found.append((name, kind, more[0] if more else {}))
    return found
