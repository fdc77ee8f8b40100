"""The second world: textured things before detailed backgrounds, seen by a camera that moves.

`training.scene` and `training.film` are the first one, which the shipped weights were shown. All
its words mean the same here.
"""
