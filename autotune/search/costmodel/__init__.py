"""Models of what every candidate would measure: one from physics, one that knows nothing but the data."""
