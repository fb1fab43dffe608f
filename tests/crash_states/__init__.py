"""What survives a power failure: states that real code can leave on a disk, each started from.

`recorder.py` records the file operations of a run or a build, `states.py` makes of them what three
models of file systems allow to be on disk at each moment, `subjects.py` starts from a state in this
process and checks what the start finds, `real_disks.py` does so from images of real file systems.
`python -m tests.crash_states --help`.
"""
