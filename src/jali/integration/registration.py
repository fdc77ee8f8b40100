"""A name of ours among diffusers' attention backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers import __version__ as diffusers_version
from diffusers.models import attention_dispatch


def add_backend_name(
    name: str, function: Callable[..., Any], context_parallel: bool = False
) -> Any:
    """The enum member of `name`, made the first time.

    diffusers has a closed enum and no call to extend it; adding a member by hand is what other
    libraries do too. Nothing else of diffusers changes, and no default does.
    """
    try:
        names = attention_dispatch.AttentionBackendName
        registry = attention_dispatch._AttentionBackendRegistry
        if name in names._value2member_map_:
            return names._value2member_map_[name]
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        register = registry.register(member, supports_context_parallel=context_parallel)
        register(function)
        names._member_map_[name.upper()] = member
        names._member_names_.append(name.upper())
        names._value2member_map_[name] = member
    except (AttributeError, TypeError) as error:  # pragma: no cover
        raise RuntimeError(
            f"diffusers {diffusers_version} keeps its attention backends in a way that jali does "
            f"not know (it knows 0.36 to 0.42): {error}"
        ) from error
    return member
