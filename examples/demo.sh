#!/usr/bin/env -S bash -ex
# The whole story in minutes on two cores: build a corpus, train, kill, resume, compare, evaluate,
# sample, report. From the root of a checkout, with the environment active; `make demo` does both.
DEMO=${DEMO:-runs/demo}

# A text that every machine has: Python's standard library. Its corpus is built once.
test -f $DEMO/text.jsonl || python -m benchmarks.texts $DEMO/text.jsonl
test -f $DEMO/data/build.json || data-pipeline build configs/data/jsonl.yaml \
    --input $DEMO/text.jsonl --output $DEMO/data validation_fraction=0.06 shard_bytes=524288 \
    tokenizer.kind=bpe tokenizer.vocab_size=4096 threads=2 split_characters=3500

# One run trains undisturbed; its twin is killed with SIGKILL at step 300, and resumes. Their losses
# and checkpoints must be the same, bit for bit.
rm -rf $DEMO/uninterrupted $DEMO/killed
pretrain verify-resume configs/experiments/demo.yaml --ranks 2 --steps 480 --kill-at 300 \
    --work-dir $DEMO data.path=$DEMO/data evaluation.max_tokens=100000

# What memory is worth, a sample, and the page of the run.
pretrain evaluate $DEMO/killed --memory-length 0 64 128 256 --max-tokens 100k
pretrain generate $DEMO/killed --prompt 'class Settings:' --tokens 260 --temperature 0.7 --top-p 0.9
pretrain report $DEMO/killed --output $DEMO
