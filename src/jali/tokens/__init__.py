"""What the tokens of a sequence are: their grid, their order, their blocks, which are real."""
