"""A wanted quality or speed to a recipe, by finished clips: `jali tune`.

Nothing is imported here, so that words can be checked before torch is loaded.
"""
