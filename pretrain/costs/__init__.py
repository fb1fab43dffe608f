"""What a run costs before it starts: parameters, FLOPs, device memory; devices and their speed."""
