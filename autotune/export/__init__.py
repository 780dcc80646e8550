"""Hands a study's decision over to whatever deploys it. One module per target."""
