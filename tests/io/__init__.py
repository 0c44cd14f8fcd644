"""The process's machinery: the loop, budgets, clients."""
