"""Settings of a run, frozen and checked. Torch-free."""
