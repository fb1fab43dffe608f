"""`python -m benchmarks data`: what reading, planning, fetching and building a corpus cost.

Each file measures one of them; nothing here imports torch.
"""
