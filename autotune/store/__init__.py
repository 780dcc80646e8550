"""Keeps everything that was asked, launched, measured and decided, beside Optuna's own tables."""
