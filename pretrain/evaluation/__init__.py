"""Loss by memory length, effective context length, probes, tasks, sampling."""
