"""jali in vLLM-Omni: the entry point of its plugins. Written to 0.32.0rc1, not run in the host.

    vllm serve MODEL --omni --diffusion-attention-config '{"per_role": {"self": {
      "backend": "RAINFUSION_ATTN", "block_sparse": {"sparsity": 0.7, "start_step": 8}}}}'

The host's list of backends is closed. RAINFUSION_ATTN is the one that brings settings for sparse
blocks, and it runs on Ascend only; everywhere else this takes its place.
"""

from __future__ import annotations

import logging

log = logging.getLogger("jali")

WRITTEN_TO = "0.32.0rc1"
BACKEND = "jali.adapters.vllm_omni.backend.JaliBackend"


def register() -> None:
    """Take the place of RAINFUSION_ATTN. The host calls this in each of its processes, whether or
    not anybody asks for the backend: so what does not fit is a warning, and no end of the host."""
    try:
        from vllm_omni.diffusion.attention.backends import registry
        from vllm_omni.platforms import current_omni_platform

        member = registry.DiffusionAttentionBackendEnum["RAINFUSION_ATTN"]
        taken = current_omni_platform.is_npu() or member.is_overridden()
        if not taken:
            registry.register_diffusion_backend(member, BACKEND)
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        log.warning(
            "jali: no backend for vLLM-Omni, whose plugins are not as in %s: %s", WRITTEN_TO, error
        )
