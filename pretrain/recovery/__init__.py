"""What follows a loss spike, lack of memory or a stop request; what a start records; faults."""
