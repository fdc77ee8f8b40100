"""What is read: plans, budgets, scores of blocks and the rules that select them."""
