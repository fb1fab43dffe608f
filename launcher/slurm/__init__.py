"""Everything that speaks to Slurm: commands, batch scripts, steps, the end of a job.

Imported by commands, sweep and status; uses the supervisor and the restart policy.
"""
