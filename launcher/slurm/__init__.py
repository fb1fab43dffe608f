"""Everything that uses Slurm: its commands, batch scripts, job steps, the end of a job."""
