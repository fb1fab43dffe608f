"""Pages, charts and tables of runs, and a run's history as data to draw. Torch-free."""
