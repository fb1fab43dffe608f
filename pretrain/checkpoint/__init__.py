"""Elastic checkpoints: saving, publishing, verifying, choosing, loading, and copies elsewhere."""
