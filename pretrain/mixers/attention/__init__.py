"""Attention over the layer's inputs, of the segment and remembered ones."""
