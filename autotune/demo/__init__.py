"""The embedded example: a small real model, a P-EAGLE head trained for it, and prompts."""
