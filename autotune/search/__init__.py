"""Chooses what to launch next, when to stop, and what to recommend. The only user of Optuna."""
