"""`data-pipeline build | verify | ...`: its commands."""

from foundation.interruption import ExitWhenInterrupted

with ExitWhenInterrupted():
    from foundation.cli import Program, targets

SUMMARIES = {
    "build": "turn text into a corpus; rerun the command to resume after a crash",
    "settings": "explain the settings of a corpus file: default, allowed values, meaning",
    "verify": "read every byte of a corpus and compare it with the manifest",
    "inspect": "show sizes, tokenizer, a sample of the text, and how even the lanes are",
    "audit": "list what each lane reads at each step, without reading tokens",
}
COMMANDS = targets("data_pipeline.commands.", SUMMARIES)
PROGRAM = Program(
    "data-pipeline",
    "Turn text into shards of tokens, and check them.",
    COMMANDS,
    libraries=("torch", "deepspeed"),
    schema="data_pipeline.config:CorpusConfig",
)
main = PROGRAM.main
