"""Every Triton kernel once, on small ragged shapes: for compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/dev/memcheck.py
"""

from __future__ import annotations

import torch

import jali

METHODS = [
    jali.Entropy(jali.Budget(0.4), q_block=64, k_block=64),
    jali.RfV2(sparsity=0.6, block_size=64),
    jali.AdaBsa(sparsity=0.6, block_size=64),
    jali.AdaBsa(cdf_threshold=0.6, block_size=64),
    jali.Psa({1: (0, 0.2), 2: (0.2, 0.4), 4: (0.4, 0.6), 8: (0.6, 0.9), 0: (0.9, 1)}),
    jali.RateDistortion(0.3, samples=4),
    jali.RateDistortion(0.3, samples=3, levels=(2, 8, "skip"), q_block=64, k_block=48),
    jali.Psa(mode="thresholdbound", importance="surrogate", similarity=(0.1, 0.0, -0.1)),
]
GRIDS = [
    (jali.TokenGrid.video(5, 9, 11, text=7), 3, 6, 2, 64),
    (jali.TokenGrid.video(3, 17, 13), 1, 2, 2, 80),
    (jali.TokenGrid.flat(701), 2, 4, 4, 128),
]


def main() -> None:
    calls = 0
    for grid, batch, heads, kv_heads, dim in GRIDS:
        make = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(batch, grid.tokens, n, dim, generator=make, device="cuda").bfloat16()
            for n in (heads, kv_heads, kv_heads)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        for method in METHODS:
            for length in (None, [grid.tokens - 5 * b for b in range(batch)]):
                if length is not None and method.token_order != jali.Raster():
                    continue
                done = jali.attend(
                    q, k, v, method=method, grid=grid, backend="triton", key_length=length
                )
                assert done.out.isfinite().all()
                calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, all finite")


if __name__ == "__main__":
    main()
