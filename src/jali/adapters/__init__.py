"""Sparse attention in any host: one function for its attention calls, one run for what they share.

Neither diffusers nor a model of ours is needed: who calls says what the tokens are, and where in
the generation the call is.
"""

from jali.adapters.run import Run, attention

__all__ = ["Run", "attention"]
