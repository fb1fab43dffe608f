"""Many runs from one sweep file: cells, local processes, Slurm job arrays.

Imported by commands; uses status and slurm.
"""
