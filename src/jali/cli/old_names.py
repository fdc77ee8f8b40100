"""Flags as ESA and PSA spell them, taken as jali's own. They are not in the help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer

from jali.cli.options import Command
from jali.cli.psa_command import as_psa

# What an old flag becomes; its value, where it has one, follows.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--attention_preset": "--preset",
        "--prompt_file": "--prompts",
        "--num_inference_steps": "--steps",
        "--guidance_scale": "--guidance",
        "--lora_path": "--lora",
        "--mean_budget": "--budget",
        "--mean-budget": "--budget",
    }
)
REPLACED: Mapping[str, tuple[str, ...]] = MappingProxyType({"--use_psa": ("--method", "psa")})
# Flags without an effect here, whether they take a value, and why nothing is lost.
DROPPED: Mapping[str, tuple[bool, str]] = MappingProxyType(
    {
        "--no_warmup": (False, "nothing is generated before the timed run"),
        "--no_timestamp": (False, "folders carry no time"),
        "--verbose": (False, "the manifest and the .sites.json files hold every call"),
        "--batch_size": (True, "prompts run one after the other"),
        "--use_legacy_sparse_attn": (False, "there is one implementation"),
    }
)


def translate(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """The command line in jali's words; options it knows stay as they are."""
    return list(_words(list(arguments), frozenset(known)))


def _words(arguments: list[str], known: frozenset[str]) -> Iterator[str]:
    while arguments:
        word = arguments.pop(0)
        name, equals, value = word.partition("=")
        dashed = f"--{name[2:].replace('_', '-')}"
        if word == "--":
            yield from (word, *arguments)
            return
        if not name.startswith("--") or name in known:
            yield word
        elif name in REPLACED:
            yield from REPLACED[name]
        elif name in DROPPED:
            takes_value, why = DROPPED[name]
            if takes_value and not equals and arguments:
                arguments.pop(0)
            typer.echo(f"jali: {name} has no effect: {why}", err=True)
        else:
            yield RENAMED.get(name, dashed if dashed in known else name) + equals + value


class OldNames(Command):
    """A command that also takes the flags of ESA's and PSA's scripts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
        words = translate(args, known)
        if "--preset" in known and "--help" not in words and not ctx.resilient_parsing:
            usual = next(param.default for param in self.params if param.name == "model")
            words = as_psa(args, words, str(usual))
        return super().parse_args(ctx, words)
