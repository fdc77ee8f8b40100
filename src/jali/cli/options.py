"""Options that several commands share, word for word."""

from __future__ import annotations

from typing import Annotated

import typer

ATTENTION, SIZE, PLACE = "Attention", "What is made", "Where and how it runs"

SourcePath = Annotated[
    str | None,
    typer.Option(help="Local folder or hub id, not the usual one.", rich_help_panel=PLACE),
]
Device = Annotated[
    str | None,
    typer.Option(help="cuda or cpu; cuda where there is one.", rich_help_panel=PLACE),
]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", rich_help_panel=PLACE)]
CpuOffload = Annotated[
    bool,
    typer.Option("--cpu-offload", help="Parts wait in host memory.", rich_help_panel=PLACE),
]
ContextParallel = Annotated[
    int,
    typer.Option(min=1, help="Ranks that share a sequence (torchrun).", rich_help_panel=PLACE),
]
TensorParallel = Annotated[
    int,
    typer.Option(min=1, help="Ranks that share the weights (torchrun).", rich_help_panel=PLACE),
]
BackendName = Annotated[
    str, typer.Option(help="auto, or one of `jali doctor`.", rich_help_panel=ATTENTION)
]
DenseFirstLayer = Annotated[
    bool | None,
    typer.Option(
        "--dense-first-layer/--sparse-first-layer",
        help="Whether layer 0 stays dense.",
        rich_help_panel=ATTENTION,
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Clip i has seed + i.", rich_help_panel=SIZE)]
