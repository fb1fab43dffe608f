"""Kimi Delta Attention: a delta rule whose state decays by channel of its keys."""
