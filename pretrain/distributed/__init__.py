"""The ranks of a run: their variables, devices and meeting, what they exchange and agree on."""
