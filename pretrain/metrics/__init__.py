"""What is measured while training, and the files it is written to."""
