"""How nano was made: its world on film, its training, and the judge that reads clips back.

Nothing of this is in the installed package, which holds the trained weights and their words.
"""
