"""Model weights into and out of the system: exports and imports."""
