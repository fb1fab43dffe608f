"""Mamba-2: a state that decays by a rate of each token."""
