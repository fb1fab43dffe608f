"""`python -m benchmarks scale`: what grows with the number of ranks, and runs whose nodes fail."""
