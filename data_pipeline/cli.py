"""`data-pipeline build | verify | ...`: its commands."""

from __future__ import annotations

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from foundation.cli import Program

# name -> (module, what it does)
COMMANDS = {
    "build": (
        "data_pipeline.commands.build",
        "turn text into a corpus; rerun the command to resume after a crash",
    ),
    "settings": (
        "data_pipeline.commands.settings",
        "explain the settings of a corpus file: default, allowed values, meaning",
    ),
    "verify": (
        "data_pipeline.commands.verify",
        "read every byte of a corpus and compare it with the manifest",
    ),
    "inspect": (
        "data_pipeline.commands.inspect",
        "show sizes, tokenizer, a sample of the text, and how even the lanes are",
    ),
    "audit": (
        "data_pipeline.commands.audit",
        "list what each lane reads at each step, without reading tokens",
    ),
}
PROGRAM = Program(
    "data-pipeline",
    "Turn text into shards of tokens, and check them.",
    COMMANDS,
    libraries=("torch", "deepspeed"),
)
main = PROGRAM.main
