"""The quality gate: does a config say what the model says without speculation, and as well?"""
