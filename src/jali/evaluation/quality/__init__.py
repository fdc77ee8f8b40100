"""How good the clips are: reading and writing them, metrics, and whole folders compared.

Nothing is imported here, so that `jali.evaluation.quality.metric` does not load a video library.
"""
