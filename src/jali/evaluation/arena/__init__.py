"""All methods on finished clips, at equal achieved work, in one process: `jali arena`.

Nothing is imported here, so that words can be checked before torch is loaded.
"""
