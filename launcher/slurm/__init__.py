"""Everything that uses Slurm: its commands, batch scripts, job steps, the end of a job.

Imported by commands, sweep and status; uses the supervisor and the restart policy.
"""
